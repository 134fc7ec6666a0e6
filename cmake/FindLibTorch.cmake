# Finds LibTorch and offers imported targets straight on its libraries:
#   LibTorch::cpu    libtorch_cpu.so + libc10.so
#   LibTorch::cuda   libtorch_cuda.so + libc10_cuda.so, only where the wheel or archive has them
# Torch's own TorchConfig.cmake is not used: that of a CUDA wheel refuses to configure without a CUDA toolkit, and with
# one it links libtorch_cuda.so, which does not start without the wheel's CUDA libraries.
#
# Looks in, first hit wins: Torch_ROOT (a folder with include/ and lib/), the private virtual environment that the
# Makefile creates (.deps/venv).
set(_ds_torch_hints "")
if(Torch_ROOT)
  set(_ds_torch_hints "${Torch_ROOT}")
elseif(DEFINED ENV{Torch_ROOT})
  set(_ds_torch_hints "$ENV{Torch_ROOT}")
else()
  file(GLOB _ds_torch_hints "${CMAKE_CURRENT_LIST_DIR}/../.deps/venv/lib/python3*/site-packages/torch")
endif()

find_path(LibTorch_INCLUDE_DIR NAMES torch/csrc/api/include/torch/torch.h HINTS ${_ds_torch_hints} PATH_SUFFIXES include
          NO_DEFAULT_PATH)
find_library(LibTorch_CPU_LIBRARY NAMES torch_cpu HINTS ${_ds_torch_hints} PATH_SUFFIXES lib NO_DEFAULT_PATH)
find_library(LibTorch_C10_LIBRARY NAMES c10 HINTS ${_ds_torch_hints} PATH_SUFFIXES lib NO_DEFAULT_PATH)
find_library(LibTorch_CUDA_LIBRARY NAMES torch_cuda HINTS ${_ds_torch_hints} PATH_SUFFIXES lib NO_DEFAULT_PATH)
find_library(LibTorch_C10_CUDA_LIBRARY NAMES c10_cuda HINTS ${_ds_torch_hints} PATH_SUFFIXES lib NO_DEFAULT_PATH)

if(LibTorch_INCLUDE_DIR AND EXISTS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h")
  set(LibTorch_VERSION "")
  foreach(_ds_part MAJOR MINOR PATCH)
    file(STRINGS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h" _ds_line REGEX "define TORCH_VERSION_${_ds_part} ")
    string(REGEX MATCH "[0-9]+$" _ds_number "${_ds_line}")
    string(APPEND LibTorch_VERSION ".${_ds_number}")
  endforeach()
  string(SUBSTRING "${LibTorch_VERSION}" 1 -1 LibTorch_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE
    "Run `make build` once (it installs LibTorch into .deps/), or pass -DTorch_ROOT=DIR with DIR/include and DIR/lib.")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(
    LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES
                             "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
  add_library(LibTorch::cpu SHARED IMPORTED)
  set_target_properties(LibTorch::cpu PROPERTIES IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}")
  # libtorch_cpu.so of a CUDA wheel names libcupti and libcudart, which its own RPATH finds at run time only.
  target_link_options(LibTorch::cpu INTERFACE "LINKER:--allow-shlib-undefined"
                      "LINKER:--unresolved-symbols=ignore-in-shared-libs")
  target_link_libraries(LibTorch::cpu INTERFACE LibTorch::c10)
  target_compile_definitions(LibTorch::c10 INTERFACE USE_C10D_GLOO USE_DISTRIBUTED)
  if(LibTorch_CUDA_LIBRARY AND LibTorch_C10_CUDA_LIBRARY)
    add_library(LibTorch::cuda SHARED IMPORTED)
    set_target_properties(LibTorch::cuda PROPERTIES IMPORTED_LOCATION "${LibTorch_CUDA_LIBRARY}")
    add_library(LibTorch::c10_cuda SHARED IMPORTED)
    set_target_properties(LibTorch::c10_cuda PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_CUDA_LIBRARY}")
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::c10_cuda LibTorch::cpu)
  endif()
endif()
