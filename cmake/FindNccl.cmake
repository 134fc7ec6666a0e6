# Finds the header of NCCL: Nccl_FOUND, Nccl_INCLUDE_DIR, Nccl_VERSION. The library itself is that of LibTorch: only
# libtorch_cuda.so links it.
#
# Looks in, first hit wins: Nccl_ROOT or NCCL_HOME, the wheel beside LibTorch, the CUDA toolkit, the system.
find_path(Nccl_INCLUDE_DIR NAMES nccl.h
          HINTS "$ENV{NCCL_HOME}/include" "${LibTorch_INCLUDE_DIR}/../../nvidia/nccl/include" ${CUDAToolkit_INCLUDE_DIRS})
if(Nccl_INCLUDE_DIR)
  set(Nccl_VERSION "")
  foreach(_ds_part MAJOR MINOR PATCH)
    file(STRINGS "${Nccl_INCLUDE_DIR}/nccl.h" _ds_line REGEX "define NCCL_${_ds_part} ")
    string(REGEX MATCH "[0-9]+$" _ds_number "${_ds_line}")
    string(APPEND Nccl_VERSION ".${_ds_number}")
  endforeach()
  string(SUBSTRING "${Nccl_VERSION}" 1 -1 Nccl_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nccl REQUIRED_VARS Nccl_INCLUDE_DIR VERSION_VAR Nccl_VERSION)
mark_as_advanced(Nccl_INCLUDE_DIR)
