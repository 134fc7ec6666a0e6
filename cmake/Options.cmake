set(DS_CUDA AUTO CACHE STRING "Build libdsengine_cuda (NCCL, kernels): AUTO = when a CUDA toolkit is found, ON, OFF")
set_property(CACHE DS_CUDA PROPERTY STRINGS AUTO ON OFF)
set(DS_SANITIZE "" CACHE STRING "Sanitizers: empty, 'address' (with undefined), or 'thread'")
set_property(CACHE DS_SANITIZE PROPERTY STRINGS "" address thread)
option(DS_FUZZ "Build the fuzzers of tests/fuzz: needs clang 16" OFF)
option(DS_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(DS_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(DS_BUILD_BENCHMARKS "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(DS_WERROR "Warnings are errors: for the project's developers and CI, whose compilers are known (preset dev)" OFF)
option(DS_RELOCATABLE "An installation names no folder of this machine, as packages want it (preset package)" OFF)
# Every source with LibTorch's headers pays 5 s for instantiating their templates; sources compiled together pay once.
option(DS_UNITY_BUILD "Compile several sources of a target together (halves a full build)" ON)
set(CMAKE_UNITY_BUILD ${DS_UNITY_BUILD})
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

if(NOT DS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DS_CUDA must be AUTO, ON or OFF, found '${DS_CUDA}'")
endif()
if(NOT DS_SANITIZE MATCHES "^(|address|thread)$")
  message(FATAL_ERROR "DS_SANITIZE must be empty, 'address' or 'thread', found '${DS_SANITIZE}'")
endif()
if(DS_SANITIZE AND DS_CUDA STREQUAL "ON")
  message(FATAL_ERROR "DS_SANITIZE=${DS_SANITIZE} and DS_CUDA=ON exclude each other: set DS_CUDA=OFF")
endif()

if(DS_FUZZ AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "DS_FUZZ needs clang, found ${CMAKE_CXX_COMPILER_ID}: configure with the preset fuzz")
endif()

# Flags that every part of the project compiles with.
add_library(ds_flags INTERFACE)
target_compile_features(ds_flags INTERFACE cxx_std_20)
target_compile_options(ds_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wno-unused-parameter -Wno-missing-field-initializers
                       -Wno-dangling-else
                       $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict -Wno-stringop-overflow>)  # false alarms of GCC 12 on std::string
# The toolkit's headers define functions of their own in every source.
target_compile_options(ds_flags INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CXX_COMPILER_ID:Clang>>:-Wno-unused-function>)
if(DS_WERROR)
  target_compile_options(ds_flags INTERFACE -Werror)
endif()
# The LibTorch wheel is built with NDEBUG, and classes of its headers have other members without it
# (at::RecordFunction): every build type must agree. Our own invariants are checked by ds::ensure, not assert.
target_compile_definitions(ds_flags INTERFACE $<$<NOT:$<CONFIG:Release,MinSizeRel>>:NDEBUG>)
if(DS_FUZZ)
  target_compile_options(ds_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(DS_SANITIZE)
  # GCC cannot see initialisation through instrumented code (its manual says so of -Wmaybe-uninitialized).
  target_compile_options(ds_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()
if(DS_SANITIZE STREQUAL "address")
  target_compile_options(ds_flags INTERFACE -fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  target_link_options(ds_flags INTERFACE -fsanitize=address,undefined)
elseif(DS_SANITIZE STREQUAL "thread")
  target_compile_options(ds_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(ds_flags INTERFACE -fsanitize=thread)
endif()
