#include "profiling/operator_work.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/split/split_tensor.h"

namespace ds::profiling {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Rule = OperatorWork (*)(Inputs inputs);

// The tensor at input `i`; undefined where there is none.
at::Tensor tensor(Inputs inputs, size_t i) {
  return i < inputs.size() && inputs[i].isTensor() ? inputs[i].toTensor() : at::Tensor();
}

OperatorWork of_macs(int64_t macs) { return {.macs = macs, .flops = 2 * macs}; }
OperatorWork of_flops(int64_t flops) { return {.flops = flops}; }

// The work of a product of [..., m, k] and [..., k, n], whose leading dimensions are those of the first.
OperatorWork of_product(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || b.dim() == 0) return {};
  return of_macs(a.numel() * (b.dim() > 1 ? b.size(-1) : 1));
}

template <size_t kFirst>
OperatorWork product(Inputs inputs) {
  return of_product(tensor(inputs, kFirst), tensor(inputs, kFirst + 1));
}

OperatorWork nothing(Inputs /*inputs*/) { return {}; }

template <int kPerElement, size_t kInput = 0>
OperatorWork per_element(Inputs inputs) {
  const at::Tensor values = tensor(inputs, kInput);
  return of_flops(values.defined() ? kPerElement * values.numel() : 0);
}

// A normalisation with its weight at `kWeight`.
template <size_t kInput, size_t kWeight, int kTimes>
OperatorWork normalization(Inputs inputs) {
  const at::Tensor values = tensor(inputs, kInput);
  const int64_t per_element = tensor(inputs, kWeight).defined() ? 5 : 4;
  return of_flops(kTimes * per_element * values.numel());
}

// Training counts statistics, too.
OperatorWork batch_norm(Inputs inputs) {
  const bool trains = inputs.size() > 5 && inputs[5].isBool() && inputs[5].toBool();
  return of_flops((trains ? 5 : 2) * tensor(inputs, 0).numel());
}

int64_t product_of(c10::IntArrayRef sizes, size_t from) {
  int64_t result = 1;
  for (size_t i = from; i < sizes.size(); ++i) result *= sizes[i];
  return result;
}

// The work of a convolution: a weight [out, in / groups, kernel...] (transposed: [in, out / groups, kernel...]) at each
// place of the output (of the input).
int64_t convolution_macs(const at::Tensor& weight, int64_t batch, int64_t places) {
  return batch * places * weight.numel();
}

int64_t output_places(Inputs inputs) {
  const at::Tensor input = tensor(inputs, 0);
  const at::Tensor weight = tensor(inputs, 1);
  const std::vector<int64_t> stride = inputs[3].toIntVector();
  const std::vector<int64_t> padding = inputs[4].toIntVector();
  const std::vector<int64_t> dilation = inputs[5].toIntVector();
  const auto at_dimension = [](const std::vector<int64_t>& values, size_t d) {
    return values.size() == 1 ? values[0] : values[d];
  };
  int64_t places = 1;
  for (size_t d = 0; d + 2 < static_cast<size_t>(input.dim()); ++d) {
    const auto dim = static_cast<int64_t>(d) + 2;
    const int64_t reach = at_dimension(dilation, d) * (weight.size(dim) - 1) + 1;
    places *= (input.size(dim) + 2 * at_dimension(padding, d) - reach) / at_dimension(stride, d) + 1;
  }
  return places;
}

OperatorWork convolution(Inputs inputs) {
  const at::Tensor input = tensor(inputs, 0);
  const bool transposed = inputs[6].toBool();
  const int64_t places = transposed ? product_of(input.sizes(), 2) : output_places(inputs);
  return of_macs(convolution_macs(tensor(inputs, 1), input.size(0), places));
}

// (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask):
// a product for the input's gradient and one for the weight's.
OperatorWork convolution_backward(Inputs inputs) {
  const bool transposed = inputs[7].toBool();
  const at::Tensor per_place = tensor(inputs, transposed ? 1 : 0);
  const auto wanted = inputs[10].toList();
  const int64_t products = (wanted.get(0).toBool() ? 1 : 0) + (wanted.get(1).toBool() ? 1 : 0);
  return of_macs(products * convolution_macs(tensor(inputs, 2), per_place.size(0), product_of(per_place.sizes(), 2)));
}

// query [..., s, d], key [..., t, d], value [..., t, e] from input kFirst on: kScores products with d, kValues with e.
// Input kCausal says whether the mask is causal. Backward, with more than one product with d, computes the scores
// again.
template <size_t kFirst, int kScores, int kValues, size_t kCausal>
OperatorWork attention(Inputs inputs) {
  const at::Tensor query = tensor(inputs, kFirst);
  const at::Tensor key = tensor(inputs, kFirst + 1);
  const at::Tensor value = tensor(inputs, kFirst + 2);
  const int64_t pairs = query.numel() / std::max<int64_t>(query.size(-1), 1) * key.size(-2);
  OperatorWork work = of_macs(pairs * (kScores * query.size(-1) + kValues * value.size(-1)));
  if (kScores > 1) work.repeated_macs = pairs * query.size(-1);
  const bool causal = inputs.size() > kCausal && inputs[kCausal].isBool() && inputs[kCausal].toBool();
  if (causal) work.masked_macs = (work.macs - work.repeated_macs) / 2;
  return work;
}

// The elements of the broadcast result.
OperatorWork pointwise(Inputs inputs) {
  std::vector<int64_t> sizes;
  bool any = false;
  for (const c10::IValue& input : inputs) {
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    const at::Tensor values = input.toTensor();
    sizes = any ? at::infer_size(sizes, values.sizes()) : values.sizes().vec();
    any = true;
  }
  return of_flops(any ? product_of(sizes, 0) : 0);
}

using Rules = std::unordered_map<std::string_view, Rule>;

// Products, convolutions, attention.
const Rules& product_rules() {
  static const Rules kRules = {
      {"aten::mm", product<0>},
      {"aten::bmm", product<0>},
      {"aten::mv", product<0>},
      {"aten::dot", product<0>},
      {"aten::_scaled_mm", product<0>},
      {"aten::_int_mm", product<0>},
      {"aten::addmm", product<1>},
      {"aten::addmm_", product<1>},
      {"aten::_addmm_activation", product<1>},
      {"aten::baddbmm", product<1>},
      {"aten::baddbmm_", product<1>},
      {"aten::addbmm", product<1>},
      {"aten::addbmm_", product<1>},
      {"aten::addmv", product<1>},
      {"aten::addmv_", product<1>},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention<0, 1, 1, 4>},
      {"aten::_scaled_dot_product_flash_attention", attention<0, 1, 1, 4>},
      {"aten::_scaled_dot_product_efficient_attention", attention<0, 1, 1, 6>},
      {"aten::_scaled_dot_product_cudnn_attention", attention<0, 1, 1, 6>},
      // Scores again, their gradient from that of the output; gradients of query, key and value.
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention<1, 3, 2, 7>},
      {"aten::_scaled_dot_product_flash_attention_backward", attention<1, 3, 2, 11>},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention<1, 3, 2, 11>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", attention<1, 3, 2, 14>}};
  return kRules;
}

const Rules& other_rules() {
  static const Rules kRules = {{"aten::native_layer_norm", normalization<0, 2, 1>},
                               {"aten::native_layer_norm_backward", normalization<1, 5, 2>},
                               {"aten::native_group_norm", normalization<0, 1, 1>},
                               {"aten::native_group_norm_backward", normalization<1, 4, 2>},
                               {"aten::_fused_rms_norm", normalization<0, 2, 1>},
                               {"aten::_fused_rms_norm_backward", normalization<1, 4, 2>},
                               {"aten::native_batch_norm", batch_norm},
                               {"aten::native_batch_norm_backward", normalization<1, 2, 2>},
                               {"aten::cudnn_batch_norm", batch_norm},
                               {"aten::cudnn_batch_norm_backward", normalization<0, 2, 2>},
                               {"dsengine::rms_norm", per_element<5>},
                               {"dsengine::layer_norm", per_element<5>},
                               {"dsengine::add_rms_norm", per_element<6>},
                               {"dsengine::add_layer_norm", per_element<6>},
                               {"dsengine::swiglu", per_element<2>},
                               {"dsengine::rope", per_element<3>},
                               {"aten::_softmax", per_element<1>},
                               {"aten::_softmax_backward_data", per_element<1>},
                               {"aten::_log_softmax", per_element<1>},
                               {"aten::_log_softmax_backward_data", per_element<1>},
                               {"aten::avg_pool1d", per_element<1>},
                               {"aten::avg_pool2d", per_element<1>},
                               {"aten::avg_pool3d", per_element<1>},
                               {"aten::max_pool2d_with_indices", per_element<1>},
                               {"aten::max_pool3d_with_indices", per_element<1>},
                               {"aten::_adaptive_avg_pool2d", per_element<1>},
                               {"aten::adaptive_max_pool2d", per_element<1>},
                               // Copies and conversions are pointwise to LibTorch.
                               {"aten::copy_", nothing},
                               {"aten::_to_copy", nothing},
                               {"aten::clone", nothing},
                               {"aten::fill_", nothing},
                               {"aten::zero_", nothing},
                               {"aten::detach", nothing},
                               {"aten::alias", nothing}};
  return kRules;
}

Rule find_rule(const char* name) {
  for (const Rules* rules : {&product_rules(), &other_rules()}) {
    const auto named = rules->find(name);
    if (named != rules->end()) return named->second;
  }
  // By any overload: those of one operator are alike in this.
  const std::string text = name;
  for (const char* overload : {"", "Tensor", "Scalar"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({text, overload});
    if (op && op->hasTag(at::Tag::pointwise)) return pointwise;
  }
  return nullptr;
}

Rule rule_of(const char* name) {
  thread_local std::unordered_map<std::string, Rule> known;
  const auto [entry, is_new] = known.try_emplace(name);
  if (is_new) entry->second = find_rule(name);
  return entry->second;
}

// Shows the sizes of the whole: below, the operator is computed on this rank's part.
bool is_whole_of_parts(Inputs inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [](const c10::IValue& input) {
    return input.isTensor() && input.toTensor().defined() && is_split(input.toTensor());
  });
}

}  // namespace

std::optional<OperatorWork> work_of(const char* name, Inputs inputs) {
  const Rule rule = rule_of(name);
  if (rule == nullptr || is_whole_of_parts(inputs)) return std::nullopt;
  return rule(inputs);
}

}  // namespace ds::profiling
