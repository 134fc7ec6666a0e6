#include "optim/vector_update.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/check.h"
#include "core/float_format_of.h"
#include "core/host_threads.h"

namespace ds::optimizers {
namespace {

// Elements: threads begin at cache lines of every array, and get enough of them to be worth waking.
constexpr int64_t kRangeUnit = 1024;
constexpr int64_t kRangeGrain = int64_t{1} << 15;

bool is_float_array(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == at::kFloat;
}

bool fits(const SliceTensors& slice) {
  return is_float_array(slice.master) && slice.gradient.is_cpu() && slice.gradient.is_contiguous() &&
         float_format_of(slice.gradient.scalar_type()).has_value() &&
         std::all_of(slice.states.begin(), slice.states.end(),
                     [](const at::Tensor& state) { return !state.defined() || is_float_array(state); });
}

bool is_copy_array(const at::Tensor& copy) {
  return copy.defined() && copy.is_cpu() && copy.is_contiguous() && float_format_of(copy.scalar_type()).has_value();
}

}  // namespace

SliceArrays arrays_of(const SliceTensors& slice, bool with_copy) {
  SliceArrays arrays;
  arrays.master = slice.master.mutable_data_ptr<float>();
  ensure(slice.states.size() <= std::size(arrays.states), "a slice has at most 3 states");
  for (size_t s = 0; s < slice.states.size(); ++s) {
    if (slice.states[s].defined()) arrays.states[s] = slice.states[s].mutable_data_ptr<float>();
  }
  arrays.gradient = slice.gradient.const_data_ptr();
  arrays.gradient_type = *float_format_of(slice.gradient.scalar_type());
  arrays.gradient_scale = static_cast<float>(slice.gradient_scale);
  if (with_copy && slice.copy.defined()) {
    arrays.copy = slice.copy.mutable_data_ptr();
    arrays.copy_type = *float_format_of(slice.copy.scalar_type());
  }
  return arrays;
}

void update_slice(const SliceTensors& slice, const VectorKernel& kernel, const std::function<void()>& libtorch) {
  const at::NoGradGuard no_grad;
  bool copied = false;
  if (fits(slice)) {
    copied = is_copy_array(slice.copy);
    const SliceArrays arrays = arrays_of(slice, copied);
    for_each_range(slice.master, kRangeUnit, kRangeGrain,
                   [&](int64_t begin, int64_t end) { kernel(arrays, begin, end); });
  } else {
    libtorch();
  }
  if (slice.copy.defined() && !copied) slice.copy.copy_(slice.master);
}

}  // namespace ds::optimizers
