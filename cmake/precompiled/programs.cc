// Nothing: CMake attaches the precompiled header of the examples to a target that has a source.
