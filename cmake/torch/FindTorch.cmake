# find_package(Torch) of a project that has called find_package(dsengine COMPONENTS Torch): the target `torch` and the
# variables TORCH_LIBRARIES, TORCH_INCLUDE_DIRS and TORCH_CXX_FLAGS of Torch's own package, on the CPU libraries of the
# LibTorch that dsengine uses. Torch's package of a CUDA wheel cannot be had without a CUDA toolkit.
if(NOT TARGET torch)
  add_library(torch INTERFACE IMPORTED)
  target_link_libraries(torch INTERFACE LibTorch::cpu)
endif()
set(TORCH_LIBRARIES torch)
set(TORCH_INCLUDE_DIRS "${LibTorch_INCLUDE_DIR}" "${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
set(TORCH_CXX_FLAGS "")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Torch REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_INCLUDE_DIR VERSION_VAR LibTorch_VERSION)
