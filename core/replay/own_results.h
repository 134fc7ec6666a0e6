// Operators whose results LibTorch's kernels would not give: a kernel of ours in front of these knows a layer by the
// identity of its weight, and computes something else. Who runs recorded operators again on tensors that are elements
// and nothing more, as activation checkpointing of modules, gets LibTorch's results there, and has to keep these.
#pragma once

#include <cstdint>

namespace ds {

// The count of such operators on this thread.
class OwnResults {
 public:
  // Called by such a kernel, for each operator that it computes.
  static void note();
  // The number of calls of note(): another number than before an operator says that it was one, or has called one.
  static uint64_t noted();
};

}  // namespace ds
