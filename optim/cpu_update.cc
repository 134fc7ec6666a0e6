#include "optim/cpu_update.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/check.h"
#include "core/host_threads.h"
#include "core/numbers/float_format_of.h"

namespace ds::optimizers {
namespace {

// Elements: threads begin at cache lines of every array, and get enough of them to be worth waking.
constexpr int64_t kRangeUnit = 1024;
constexpr int64_t kRangeGrain = int64_t{1} << 15;

bool is_array(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && float_format_of(tensor.scalar_type()).has_value();
}

bool fits(const SliceTensors& slice) {
  return is_array(slice.master) && is_array(slice.gradient) &&
         std::all_of(slice.states.begin(), slice.states.end(),
                     [](const at::Tensor& state) { return !state.defined() || is_array(state); });
}

}  // namespace

SliceArrays arrays_of(const SliceTensors& slice, bool with_copy) {
  SliceArrays arrays;
  arrays.master = slice.master.mutable_data_ptr();
  arrays.master_type = *float_format_of(slice.master.scalar_type());
  ensure(slice.states.size() <= std::size(arrays.states), "a slice has at most 3 states");
  std::optional<FloatFormat> type;
  for (size_t s = 0; s < slice.states.size(); ++s) {
    if (!slice.states[s].defined()) continue;
    arrays.states[s] = slice.states[s].mutable_data_ptr();
    arrays.state_type = *float_format_of(slice.states[s].scalar_type());
    ensure(type.value_or(arrays.state_type) == arrays.state_type, "states of a slice have one dtype");
    type = arrays.state_type;
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
    copied = slice.copy.defined() && is_array(slice.copy);
    const SliceArrays arrays = arrays_of(slice, copied);
    for_each_range(slice.master, kRangeUnit, kRangeGrain,
                   [&](int64_t begin, int64_t end) { kernel(arrays, begin, end); });
  } else {
    libtorch();
  }
  if (slice.copy.defined() && !copied) slice.copy.copy_(slice.master);
}

}  // namespace ds::optimizers
