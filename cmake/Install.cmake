# cmake --install: the library, its headers under include/dsengine, ds-launch, ds-tool and its ds-tool-*, the
# ready-made configs, and a package for find_package(dsengine).
include(CMakePackageConfigHelpers)

set(_ds_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dsengine)

install(TARGETS dsengine EXPORT dsengine-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET dsengine_cuda)
  install(TARGETS dsengine_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(TARGETS ds-launch ds-tool ds-tool-bench ds-tool-checkpoint ds-tool-libraries RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT dsengine-targets NAMESPACE dsengine:: DESTINATION ${_ds_package_dir})
foreach(_ds_folder core comm optim zero offload recompute compression pipeline profiling checkpoint engine)
  install(
    DIRECTORY ${PROJECT_SOURCE_DIR}/${_ds_folder}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dsengine
    FILES_MATCHING
    PATTERN "*.h"
    PATTERN "cuda" EXCLUDE
    PATTERN "gloo_shim" EXCLUDE
    PATTERN "*-inl.h" EXCLUDE
    PATTERN "engine_impl.h" EXCLUDE)
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/dsengine)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dsengine-config.cmake.in
                              ${PROJECT_BINARY_DIR}/dsengine-config.cmake INSTALL_DESTINATION ${_ds_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dsengine-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dsengine-config.cmake ${PROJECT_BINARY_DIR}/dsengine-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${_ds_package_dir})
