// Tables of functions that the library of a device (libdsengine_cuda, or the tests' simulated GPU) registers when it is
// loaded: kernels, reads of files, pools of memory. The type of a table names it: a process has one table of each type.
//
// Torch-free and C++17, so that a compiler of kernels reads it. Thread safe, also while static objects are made.
#pragma once

#include <atomic>

namespace ds {
namespace device_functions_detail {

// One object in all libraries of the process, as every inline variable.
template <class Table>
inline std::atomic<const Table*> registered{nullptr};

}  // namespace device_functions_detail

// Registers the table, which lives as long as the process; a later one takes its place.
template <class Table>
void set_device_functions(const Table* table) {
  device_functions_detail::registered<Table>.store(table);
}

// The registered table; null until a library that has one is loaded.
template <class Table>
const Table* device_functions() {
  return device_functions_detail::registered<Table>.load();
}

}  // namespace ds
