// Nothing: CMake attaches a precompiled header, of the examples and of tests without LibTorch, to a target that has a
// source.
