# Read by cpack for each kind of package.
if(NOT CPACK_DS_RELOCATABLE)
  message(FATAL_ERROR "cpack: this build names the LibTorch of this machine in what it installs; pack a build with \
DS_RELOCATABLE=ON (`make package`, or cmake --preset package)")
endif()
if(CPACK_GENERATOR STREQUAL "TGZ")
  list(APPEND CPACK_COMPONENTS_ALL Bundle)
  set(CPACK_COMPONENT_INCLUDE_TOPLEVEL_DIRECTORY ON)
  set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
endif()
