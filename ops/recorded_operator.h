// Makes a computation of ours an operator for those who watch operators (at::RecordFunction): ZeRO stage 3 gathers the
// parameters among its inputs before they are read, activation checkpointing notes them, a profiler shows its name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <initializer_list>
#include <vector>

namespace ds::ops {

// Lives while the memory of `inputs` is read, and is made before their data pointers are taken. Undefined ones are left
// out. `name` must outlive it.
class RecordedOperator {
 public:
  RecordedOperator(const char* name, std::initializer_list<at::Tensor> inputs) : function_(at::RecordScope::FUNCTION) {
    if (!function_.isActive()) return;
    for (const at::Tensor& input : inputs) {
      if (input.defined()) inputs_.emplace_back(input);
    }
    function_.before(name, c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()));
  }

 private:
  std::vector<c10::IValue> inputs_;  // before function_: callbacks may look at them until it ends
  at::RecordFunction function_;
};

}  // namespace ds::ops
