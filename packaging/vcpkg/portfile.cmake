# An overlay port: vcpkg install dsengine --overlay-ports=packaging --triplet x64-linux-dynamic
#
# vcpkg's own libtorch is older than the range, so that LibTorch is the one of Torch_ROOT in the environment (the wheel's
# folder, with include/ and lib/), which a custom triplet lets through by VCPKG_ENV_PASSTHROUGH.
if(NOT DEFINED ENV{Torch_ROOT})
  message(FATAL_ERROR "dsengine needs LibTorch 2.11 to 2.15: set Torch_ROOT to its folder with include/ and lib/, and let it \
through in the triplet: set(VCPKG_ENV_PASSTHROUGH Torch_ROOT)")
endif()
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../..")

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DTorch_ROOT=$ENV{Torch_ROOT} -DDS_CUDA=OFF -DDS_BUILD_TESTS=OFF -DDS_BUILD_EXAMPLES=OFF -DDS_BUILD_BENCHMARKS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/dsengine)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")

# No licence has been chosen yet.
if(EXISTS "${SOURCE_PATH}/LICENSE")
  vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
else()
  file(WRITE "${CURRENT_PACKAGES_DIR}/share/${PORT}/copyright" "No licence has been chosen for dsengine yet.\n")
endif()
