# cmake --install: the library, its public headers (include/dsengine), ds-launch, ds-tool and its ds-tool-*, the
# ready-made configs, and a package for find_package(dsengine).
include(CMakePackageConfigHelpers)

set(_ds_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dsengine)

install(TARGETS dsengine EXPORT dsengine-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} FILE_SET HEADERS)
if(TARGET dsengine_cuda)
  install(TARGETS dsengine_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(TARGETS ds-launch ds-tool ds-tool-bench ds-tool-checkpoint ds-tool-libraries RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT dsengine-targets NAMESPACE dsengine:: DESTINATION ${_ds_package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/dsengine)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dsengine-config.cmake.in
                              ${PROJECT_BINARY_DIR}/dsengine-config.cmake INSTALL_DESTINATION ${_ds_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dsengine-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dsengine-config.cmake ${PROJECT_BINARY_DIR}/dsengine-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${_ds_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/cmake/torch/FindTorch.cmake DESTINATION ${_ds_package_dir}/torch)
