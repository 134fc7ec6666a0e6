# ds_add_part(NAME [TORCH] SOURCES ... [DEPENDS ...])
# One OBJECT library for a folder (or the torch-free half of one). Without TORCH its sources cannot see LibTorch's
# headers, which is what keeps ds-launch and ds-tool free of it.
#
# Parts with TORCH share one precompiled header: of the 17 s that a source of engine/ would take, 16 are LibTorch's headers.
function(ds_add_precompiled_torch)
  add_library(ds_precompiled_torch OBJECT ${PROJECT_SOURCE_DIR}/cmake/precompiled/torch.cc)
  set_target_properties(ds_precompiled_torch PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(ds_precompiled_torch PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(ds_precompiled_torch PRIVATE ds_flags LibTorch::cpu nlohmann_json::nlohmann_json)
  target_precompile_headers(ds_precompiled_torch PRIVATE <cmake/precompiled/torch.h>)  # by a name that is alike in all checkouts
endfunction()

function(ds_add_part name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(ds_${name} OBJECT ${arg_SOURCES})
  target_include_directories(ds_${name} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
  set_target_properties(ds_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(ds_${name} PUBLIC ds_flags)
  if(arg_TORCH)
    target_link_libraries(ds_${name} PUBLIC LibTorch::cpu)
    target_precompile_headers(ds_${name} REUSE_FROM ds_precompiled_torch)
  endif()
  foreach(dep IN LISTS arg_DEPENDS)
    target_include_directories(ds_${name} PUBLIC $<TARGET_PROPERTY:${dep},INTERFACE_INCLUDE_DIRECTORIES>)
  endforeach()
endfunction()

# ds_add_test(NAME LEVEL unit|threads|processes [TORCH] SOURCES ... [LIBRARIES ...] [TIMEOUT seconds] [PROCESSORS n])
# A GoogleTest binary, labelled with its level. It runs whole, as one ctest entry: a process with LibTorch takes half a
# second to start, which a process per case would pay a thousand times. Cases that start processes are entries of their
# own. TIMEOUT is that of an entry.
function(ds_add_test name)
  cmake_parse_arguments(arg "TORCH" "LEVEL;TIMEOUT;PROCESSORS" "SOURCES;LIBRARIES" ${ARGN})
  if(NOT arg_LEVEL MATCHES "^(unit|threads|processes)$")
    message(FATAL_ERROR "ds_add_test(${name}): LEVEL must be unit, threads or processes, found '${arg_LEVEL}'")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES})
  target_compile_options(${name} PRIVATE -O0)  # what is tested is optimised; tests need not be
  if(arg_TORCH)
    target_link_libraries(${name} PRIVATE dsengine ds_test_main_torch GTest::gmock)
    target_precompile_headers(${name} REUSE_FROM ds_test_main_torch)
  else()
    target_link_libraries(${name} PRIVATE ds_flags GTest::gmock GTest::gtest GTest::gtest_main)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(arg_LEVEL MATCHES "unit|threads")
    set_property(GLOBAL APPEND PROPERTY DS_SANITIZED_TESTS ${name})
  endif()
  set(properties LABELS ${arg_LEVEL} TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS})
  # Programs that name no device take a GPU where there is one, and these tests are of the CPU.
  if(NOT CMAKE_CURRENT_SOURCE_DIR MATCHES "/tests/gpu$")
    list(APPEND properties ENVIRONMENT "CUDA_VISIBLE_DEVICES=")
  endif()
  if(arg_LEVEL STREQUAL "processes")
    gtest_discover_tests(${name} TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 60 DISCOVERY_MODE PRE_TEST PROPERTIES ${properties})
  else()
    add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name} PROPERTIES ${properties})
  endif()
endfunction()

# ds_add_script_test(NAME SCRIPT PROPERTIES...)
# A script of the current folder, run as SCRIPT build-folder scratch-folder source-folder, with the level processes.
function(ds_add_script_test name script)
  cmake_path(GET script STEM stem)
  add_test(NAME ${name} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/${script} ${PROJECT_BINARY_DIR}
                                ${CMAKE_CURRENT_BINARY_DIR}/${stem} ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES LABELS processes ENVIRONMENT "CUDA_VISIBLE_DEVICES=" ${ARGN})
endfunction()
