// What a pickle may ask its reader to call. Torch-free.
#pragma once

#include <string_view>

namespace ds::checkpoint {

// Whether a class or function, "module.name", is among those that torch, LibTorch, DeepSpeed and numpy write into
// checkpoints, or a plain type of Python's library. None of them is run, whatever this says: a file that asks for
// another one was made to do something to whoever loads it in Python, or holds objects of a program of its own.
bool is_known_callable(std::string_view name);

}  // namespace ds::checkpoint
