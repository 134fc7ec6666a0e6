// optim/device_kernels.h for the simulated GPU: the same rules, one element after the other.
#include <vector>

#include "optim/device_kernels.h"
#include "optim/kernels/element_rules.h"
#include "optim/kernels/muon_rules.h"
#include "tests/simulated_gpu/kernel_work.h"
#include "tests/simulated_gpu/update_kernels.h"

namespace ds::simulated_gpu {
namespace {

using optimizers::DeviceSlice;
using optimizers::SliceArrays;
using optimizers::UpdateScale;

template <class Rule>
void update_slice_by(const Rule& rule, const DeviceSlice& slice, float scale) {
  const SliceArrays& arrays = slice.arrays;
  for (int64_t i = 0; i < slice.numel; ++i) {
    float own[3] = {};
    for (size_t s = 0; s < Rule::kStates; ++s) own[s] = value_at(arrays.states[s], arrays.state_type, i);
    const float before = value_at(arrays.master, arrays.master_type, i);
    const float w = rule(before, value_at(arrays.gradient, arrays.gradient_type, i) * scale, own);
    put_value(arrays.master, arrays.master_type, i, w);
    for (size_t s = 0; s < Rule::kStates; ++s) put_value(arrays.states[s], arrays.state_type, i, own[s]);
    if (arrays.copy == nullptr) continue;
    put_value(arrays.copy, arrays.copy_type, i, value_at(arrays.master, arrays.master_type, i));
  }
}

std::vector<Access> accesses_of(const std::vector<DeviceSlice>& slices, const UpdateScale& scale) {
  std::vector<Access> accesses;
  for (const auto& [arrays, numel] : slices) {
    accesses.push_back(access_to(arrays.master, numel * bytes_of(arrays.master_type), true));
    for (const void* state : arrays.states) {
      if (state != nullptr) accesses.push_back(access_to(state, numel * bytes_of(arrays.state_type), true));
    }
    accesses.push_back(access_to(arrays.gradient, numel * bytes_of(arrays.gradient_type), false));
    if (arrays.copy == nullptr) continue;
    accesses.push_back(access_to(arrays.copy, numel * bytes_of(arrays.copy_type), true));
  }
  for (const float* scalar : {scale.device_factor, scale.skip}) {
    if (scalar != nullptr) accesses.push_back(access_to(scalar, 4, false));
  }
  return accesses;
}

template <class Rule>
const char* give_update(const DeviceSlice* slices, const typename Rule::Coefficients* coefficients, int64_t count,
                        const UpdateScale& scale, void* stream) {
  const std::vector<DeviceSlice> taken(slices, slices + count);
  const std::vector<typename Rule::Coefficients> rules(coefficients, coefficients + count);
  return run_kernel(stream, "update of slices", accesses_of(taken, scale), [=] {
    if (scale.skip != nullptr && *scale.skip != 0.0F) return;
    const float factor = scale.device_factor == nullptr ? scale.factor : scale.factor * *scale.device_factor;
    for (size_t i = 0; i < taken.size(); ++i) update_slice_by(Rule(rules[i]), taken[i], factor);
  });
}

const char* give_adam(const DeviceSlice* slices, const optimizers::AdamCoefficients* coefficients, int64_t count,
                      const UpdateScale& scale, void* stream) {
  const bool amsgrad = count > 0 && coefficients[0].amsgrad;
  const auto give = amsgrad ? give_update<optimizers::AdamElement<true>> : give_update<optimizers::AdamElement<false>>;
  return give(slices, coefficients, count, scale, stream);
}

const char* give_sgd(const DeviceSlice* slices, const optimizers::SgdCoefficients* coefficients, int64_t count,
                     const UpdateScale& scale, void* stream) {
  const bool momentum = count > 0 && slices[0].arrays.states[0] != nullptr;
  const auto give = momentum ? give_update<optimizers::SgdElement<true>> : give_update<optimizers::SgdElement<false>>;
  return give(slices, coefficients, count, scale, stream);
}

constexpr optimizers::UpdateDeviceKernels kUpdateKernels{give_adam,
                                                         give_update<optimizers::LionElement>,
                                                         give_update<optimizers::AdagradElement>,
                                                         give_sgd,
                                                         give_update<optimizers::MuonBlendElement>,
                                                         give_update<optimizers::MuonStepElement>,
                                                         {give_lamb_advance, give_lamb_apply}};

const bool kUpdateKernelsRegistered = (set_device_functions(&kUpdateKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
