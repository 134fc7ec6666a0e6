# cpack: Debian packages and a relocatable tarball, out of a build of the preset package (`make package`). None of them
# holds LibTorch, and each is for one minor version of it, which its version names: 0.1.0+torch2.11.
set(CPACK_PACKAGE_NAME dsengine)
set(CPACK_PACKAGE_VENDOR "The dsengine authors")
set(CPACK_PACKAGE_CONTACT "The dsengine maintainers <maintainers@dsengine.invalid>")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION}+torch${DS_TORCH_MINOR})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)

# The text of a file LICENSE, where there is one.
set(DS_LICENCE "No licence has been chosen for dsengine yet: it comes without any permission to copy, change or share it.\n")
if(EXISTS ${PROJECT_SOURCE_DIR}/LICENSE)
  file(READ ${PROJECT_SOURCE_DIR}/LICENSE DS_LICENCE)
endif()
set(_ds_licence_note "")
if(NOT EXISTS ${PROJECT_SOURCE_DIR}/LICENSE)
  set(_ds_licence_note "\n.\n${DS_LICENCE}")
endif()
file(CONFIGURE OUTPUT ${_ds_made}/copyright CONTENT "@DS_LICENCE@" @ONLY)

# --- what is in which package ---
set(_ds_needs_torch "It needs LibTorch ${DS_TORCH_MINOR}, which is in no package of Debian's (its own libtorch is older and is not \
supported): pip install 'torch==${DS_TORCH_MINOR}.*' into a virtual environment whose python3 is on PATH, or set Torch_ROOT to a \
folder with its include/ and lib/.${_ds_licence_note}")
set(_ds_components Core Development Tools)
if(TARGET dsengine_cuda)
  list(APPEND _ds_components Cuda)
endif()
set(_ds_debian_Core libdsengine0)
set(_ds_debian_Cuda libdsengine0-cuda)
set(_ds_debian_Development libdsengine-dev)
set(_ds_debian_Tools dsengine-tools)
set(CPACK_COMPONENT_CORE_DESCRIPTION "The shared library.\n.\n${_ds_needs_torch}")
set(CPACK_COMPONENT_CUDA_DESCRIPTION "The part for GPUs, which programs open when their device is cuda.\n.\n${_ds_needs_torch}")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
    "Headers, and what find_package(dsengine) and pkg-config read.\n.\n${_ds_needs_torch}")
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "ds-launch, ds-tool and a first program. ds-launch and most commands of ds-tool do without LibTorch.\n.\n${_ds_needs_torch}")
foreach(component IN LISTS _ds_components)
  install(FILES ${_ds_made}/copyright DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${_ds_debian_${component}}
          COMPONENT ${component})
endforeach()

# --- Debian ---
# Their libraries are those of the Debian that builds them, so each release has packages of its own.
set(_ds_os "")
if(EXISTS /etc/os-release)
  file(STRINGS /etc/os-release _ds_os REGEX "^VERSION_ID=")
endif()
string(REGEX REPLACE "[^0-9]" "" _ds_os_version "${_ds_os}")
set(_ds_debian_version "${CPACK_PACKAGE_VERSION}-1~deb${_ds_os_version}")
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_VERSION ${CPACK_PACKAGE_VERSION})
set(CPACK_DEBIAN_PACKAGE_RELEASE 1~deb${_ds_os_version})
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
# Libraries that no package holds, and ours.
cmake_path(GET LibTorch_CPU_LIBRARY PARENT_PATH _ds_torch_lib)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${_ds_torch_lib} ${PROJECT_BINARY_DIR}/lib ${CUDAToolkit_LIBRARY_DIR})
foreach(component IN LISTS _ds_components)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${_ds_debian_${component}})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION libs)
  if(NOT component STREQUAL Core)
    set(CPACK_DEBIAN_${upper}_PACKAGE_DEPENDS "libdsengine0 (= ${_ds_debian_version})")
  endif()
endforeach()
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
string(APPEND CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ", nlohmann-json3-dev")
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
set(CPACK_DEBIAN_TOOLS_PACKAGE_RECOMMENDS python3)

# --- the tarball ---
# It brings the small libraries that differ between distributions, with their licences.
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_ARCHIVE_FILE_NAME dsengine-${CPACK_PACKAGE_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
configure_file(${PROJECT_SOURCE_DIR}/cmake/BundleLibraries.cmake.in ${_ds_made}/BundleLibraries.cmake.in @ONLY)
file(GENERATE OUTPUT ${_ds_made}/$<CONFIG>/BundleLibraries.cmake INPUT ${_ds_made}/BundleLibraries.cmake.in)
install(SCRIPT ${_ds_made}/$<CONFIG>/BundleLibraries.cmake COMPONENT Bundle EXCLUDE_FROM_ALL)

set(CPACK_GENERATOR TGZ)
find_program(DS_DPKG_SHLIBDEPS dpkg-shlibdeps)
find_program(DS_FILE file)  # CPack asks it which files are programs
mark_as_advanced(DS_DPKG_SHLIBDEPS DS_FILE)
if(DS_DPKG_SHLIBDEPS AND DS_FILE)
  list(APPEND CPACK_GENERATOR DEB)
else()
  message(STATUS "Debian packages: not made (they need dpkg-shlibdeps of dpkg-dev, and file)")
endif()
set(CPACK_SOURCE_GENERATOR "")
set(CPACK_COMPONENTS_ALL ${_ds_components})
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/PackageOfGenerator.cmake)
set(CPACK_DS_RELOCATABLE ${DS_RELOCATABLE})
include(CPack)

# Builds what is installed, and packs it.
add_custom_target(
  ds_packages
  COMMAND ${CMAKE_CPACK_COMMAND} --config ${PROJECT_BINARY_DIR}/CPackConfig.cmake
  WORKING_DIRECTORY ${PROJECT_BINARY_DIR}
  COMMENT "Packing"
  VERBATIM)
add_dependencies(ds_packages dsengine ds-launch ds-tool ${_ds_torch_programs})
foreach(target dsengine_cuda ds_manual)
  if(TARGET ${target})
    add_dependencies(ds_packages ${target})
  endif()
endforeach()
