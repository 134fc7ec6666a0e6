# cmake --install: the library, its public headers (include/dsengine), ds-launch, ds-tool and its ds-tool-*, the first
# example, the ready-made configs, manual pages and completion, and packages for find_package() and pkg-config. The
# components are those of the packages (Packages.cmake) and of find_package(dsengine): Core, Cuda, Development, Tools.
include(CMakePackageConfigHelpers)

set(_ds_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dsengine)
set(_ds_libexec_dir ${CMAKE_INSTALL_LIBEXECDIR}/dsengine)
set(_ds_made ${PROJECT_BINARY_DIR}/installed)

# What the files below are configured with.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" DS_TORCH_MINOR "${LibTorch_VERSION}")
set(DS_INSTALLED_LIBDIR ${CMAKE_INSTALL_LIBDIR})
set(DS_INSTALLED_TORCH "")
if(NOT DS_RELOCATABLE)
  cmake_path(GET LibTorch_INCLUDE_DIR PARENT_PATH DS_INSTALLED_TORCH)
endif()
file(RELATIVE_PATH DS_LIBDIR_FROM_BIN ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH DS_BINDIR_FROM_PACKAGE ${CMAKE_INSTALL_FULL_LIBDIR}/cmake/dsengine ${CMAKE_INSTALL_FULL_BINDIR})
file(RELATIVE_PATH DS_LIBDIR_FROM_LIBEXEC ${CMAKE_INSTALL_FULL_LIBEXECDIR}/dsengine ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH DS_DATADIR_FROM_LIBEXEC ${CMAKE_INSTALL_FULL_LIBEXECDIR}/dsengine ${CMAKE_INSTALL_FULL_DATADIR})
file(RELATIVE_PATH DS_LIBEXEC_FROM_BIN ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBEXECDIR}/dsengine)
file(RELATIVE_PATH DS_PREFIX_FROM_LIBDIR ${CMAKE_INSTALL_FULL_LIBDIR} ${CMAKE_INSTALL_PREFIX})

# Note [Where installed binaries find LibTorch]
# A program of a user's names LibTorch's folder in its own rpath, as CMake and pkg-config write it, and the library takes
# the LibTorch that the program has loaded. The programs of ours that need LibTorch lie in libexec; their names in bin are
# links to a script that finds LibTorch and checks its version before the loader would end with an undefined symbol.
# The library also looks in a folder of its own, dsengine/torch beside it.
set(_ds_torch_programs ds-tool-bench ds-tool-checkpoint ds-tool-libraries)
if(TARGET first_step)
  list(APPEND _ds_torch_programs first_step)
endif()
set_property(TARGET dsengine APPEND PROPERTY INSTALL_RPATH $ORIGIN $ORIGIN/dsengine/torch/lib)
set_property(TARGET ds-launch ds-tool APPEND PROPERTY INSTALL_RPATH $ORIGIN/${DS_LIBDIR_FROM_BIN})
set_property(TARGET ${_ds_torch_programs} APPEND PROPERTY INSTALL_RPATH $ORIGIN/${DS_LIBDIR_FROM_LIBEXEC})

install(
  TARGETS dsengine
  EXPORT dsengine-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Core NAMELINK_COMPONENT Development
  FILE_SET HEADERS COMPONENT Development)
if(TARGET dsengine_cuda)
  set_property(TARGET dsengine_cuda APPEND PROPERTY INSTALL_RPATH $ORIGIN $ORIGIN/dsengine/torch/lib)
  if(DS_INSTALLED_TORCH)
    set_property(TARGET dsengine_cuda APPEND PROPERTY INSTALL_RPATH ${DS_INSTALLED_TORCH}/lib)
  endif()
  install(TARGETS dsengine_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Cuda)
endif()

# --- programs ---
install(TARGETS ds-launch ds-tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT Tools)
install(TARGETS ${_ds_torch_programs} RUNTIME DESTINATION ${_ds_libexec_dir} COMPONENT Tools)
configure_file(${PROJECT_SOURCE_DIR}/packaging/with_libtorch.in ${_ds_made}/with_libtorch @ONLY)
install(PROGRAMS ${_ds_made}/with_libtorch DESTINATION ${_ds_libexec_dir} COMPONENT Tools)
file(MAKE_DIRECTORY ${_ds_made}/bin)
foreach(program IN LISTS _ds_torch_programs)
  file(CREATE_LINK ${DS_LIBEXEC_FROM_BIN}/with_libtorch ${_ds_made}/bin/${program} SYMBOLIC)
  install(FILES ${_ds_made}/bin/${program} DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT Tools)
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/dsengine COMPONENT Tools)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples/01_first_step DESTINATION ${CMAKE_INSTALL_DATADIR}/dsengine/examples
        COMPONENT Tools)

# Manual pages and completion say what --help says. They are made by running the programs.
if(PROJECT_IS_TOP_LEVEL)
  find_package(Python3 3.9 COMPONENTS Interpreter)
endif()
if(PROJECT_IS_TOP_LEVEL AND Python3_FOUND AND NOT CMAKE_CROSSCOMPILING AND NOT DS_SANITIZE AND NOT CMAKE_SKIP_RPATH
   AND NOT CMAKE_SKIP_BUILD_RPATH AND NOT CMAKE_BUILD_WITH_INSTALL_RPATH)
  set(_ds_described ${_ds_made}/ds-launch.1.gz ${_ds_made}/ds-tool.1.gz ${_ds_made}/ds-launch.bash ${_ds_made}/ds-tool.bash)
  add_custom_command(
    OUTPUT ${_ds_described}
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/packaging/describe_programs.py $<TARGET_FILE:ds-launch>
            $<TARGET_FILE:ds-tool> ${_ds_made}
    DEPENDS ${PROJECT_SOURCE_DIR}/packaging/describe_programs.py ds-launch ds-tool ds-tool-bench ds-tool-checkpoint
    COMMENT "Writing the manual pages and the completion of ds-launch and ds-tool"
    VERBATIM)
  add_custom_target(ds_manual ALL DEPENDS ${_ds_described})
  foreach(program ds-launch ds-tool)
    install(FILES ${_ds_made}/${program}.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT Tools OPTIONAL)
    install(FILES ${_ds_made}/${program}.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
            RENAME ${program} COMPONENT Tools OPTIONAL)
  endforeach()
else()
  message(STATUS "Manual pages and completion: not made (they need Python 3.9 and programs that run here, without sanitizer)")
endif()

# --- find_package(dsengine) and pkg-config ---
install(EXPORT dsengine-targets NAMESPACE dsengine:: DESTINATION ${_ds_package_dir} COMPONENT Development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dsengine-config.cmake.in
                              ${PROJECT_BINARY_DIR}/dsengine-config.cmake INSTALL_DESTINATION ${_ds_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dsengine-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dsengine-config.cmake ${PROJECT_BINARY_DIR}/dsengine-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${_ds_package_dir} COMPONENT Development)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/torch/FindTorch.cmake DESTINATION ${_ds_package_dir}/torch
        COMPONENT Development)
set(DS_PC_TORCH "\${libdir}/dsengine/torch")
if(DS_INSTALLED_TORCH)
  set(DS_PC_TORCH ${DS_INSTALLED_TORCH})
endif()
foreach(name dsengine dsengine-torch)
  configure_file(${PROJECT_SOURCE_DIR}/packaging/${name}.pc.in ${_ds_made}/${name}.pc @ONLY)
  install(FILES ${_ds_made}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT Development)
endforeach()

if(PROJECT_IS_TOP_LEVEL)
  include(Packages)
endif()
