# cmake -DSOURCE=DIR -DOUTPUT=FILE -P WriteRevision.cmake
# Writes a header with the git revision of SOURCE, when it changed. A source tree that is no git tree of its own (an
# archive, perhaps unpacked inside another project's tree) has none.
cmake_minimum_required(VERSION 3.25)
set(_ds_revision "")
find_program(_ds_git git)
if(_ds_git AND EXISTS "${SOURCE}/.git")
  execute_process(COMMAND ${_ds_git} describe --always --dirty --abbrev=12 --exclude=* WORKING_DIRECTORY ${SOURCE}
                  OUTPUT_VARIABLE _ds_revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" CONTENT "#define DS_REVISION \"@_ds_revision@\"\n" @ONLY)
