#include "recompute/modules/operator_facts.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace ds::recompute {
namespace {

template <size_t kSize>
bool is_one_of(std::string_view name, const std::array<std::string_view, kSize>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::array<std::string_view, 5> kBlank = {"aten::empty_like", "aten::empty_strided", "aten::empty",
                                                    "aten::new_empty", "aten::new_empty_strided"};
// Memory of these is often filled by its pointer, which nobody sees.
constexpr std::array<std::string_view, 9> kFactories = {
    "aten::zeros_like", "aten::ones_like",         "aten::full_like",      "aten::new_zeros",    "aten::new_ones",
    "aten::new_full",   "aten::new_empty_strided", "aten::empty_permuted", "aten::scalar_tensor"};
constexpr std::array<std::string_view, 8> kOverwriting = {"aten::bernoulli_", "aten::normal_",     "aten::uniform_",
                                                          "aten::random_",    "aten::zero_",       "aten::fill_",
                                                          "aten::copy_",      "aten::exponential_"};
// Their schemas do not say that they change running statistics, arguments 3 and 4. Never computed again: a batch counts
// once.
constexpr std::array<std::string_view, 10> kBatchNorms = {"aten::native_batch_norm",
                                                          "aten::cudnn_batch_norm",
                                                          "aten::miopen_batch_norm",
                                                          "aten::_native_batch_norm_legit",
                                                          "aten::batch_norm",
                                                          "aten::_batch_norm_impl_index",
                                                          "aten::_batch_norm_with_update",
                                                          "aten::mkldnn_batch_norm",
                                                          "aten::batch_norm_gather_stats",
                                                          "aten::batch_norm_gather_stats_with_counts"};
// An operator that writes to arguments 1 and 2.
constexpr std::string_view kUpdateOfStatistics = "aten::batch_norm_update_stats";
// Give outputs of which parts may never be written.
constexpr std::array<std::string_view, 6> kWithWorkspace = {"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn",
                                                            "aten::miopen_rnn",       "aten::_embedding_bag",
                                                            "aten::_ctc_loss",        "aten::_cudnn_ctc_loss"};
// Along one row, or copies: as cheap as what is tagged pointwise.
constexpr std::array<std::string_view, 17> kCheap = {"aten::native_layer_norm",
                                                     "aten::native_group_norm",
                                                     "aten::_fused_rms_norm",
                                                     "aten::_softmax",
                                                     "aten::_log_softmax",
                                                     "aten::clone",
                                                     "aten::_to_copy",
                                                     "aten::copy_",
                                                     "aten::cat",
                                                     "aten::stack",
                                                     "aten::native_dropout",
                                                     "aten::bernoulli_",
                                                     "aten::rand_like",
                                                     "aten::glu",
                                                     "aten::mean",
                                                     "aten::sum",
                                                     "aten::rsqrt"};

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The pointwise tag stands at the functional overload of some operators alone.
bool is_tagged_pointwise(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::pointwise)) return true;
  c10::OperatorName name = op.operator_name();
  if (name.name.empty() || name.name.back() != '_') return false;
  name.name.pop_back();
  const auto functional = c10::Dispatcher::singleton().findSchema(name);
  return functional && functional->hasTag(at::Tag::pointwise);
}

bool gives_tensors_alone(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
           return returned.type()->kind() == c10::TypeKind::TensorType;
         });
}

bool gives_views(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
}

// One argument, a tensor, which is also what it gives: an operator in place, not one with an `out`.
bool is_in_place(const c10::FunctionSchema& schema, const std::vector<size_t>& writes) {
  return writes == std::vector<size_t>{0} && !schema.arguments()[0].is_out() &&
         schema.arguments()[0].type()->kind() == c10::TypeKind::TensorType;
}

OperatorFacts find_facts(const c10::OperatorHandle& op) {
  OperatorFacts facts;
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  facts.name = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
  facts.returns = schema.returns().size();
  using c10::DispatchKey;
  const bool is_update = name == kUpdateOfStatistics;
  const bool is_batch_norm = is_update || is_one_of(name, kBatchNorms);
  // A kernel below autograd is taken before the composition. Batch normalization may get one (convert_sync_batchnorm).
  facts.composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
                    !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
                    !op.hasKernelForDispatchKey(DispatchKey::CPU) && !op.hasKernelForDispatchKey(DispatchKey::CUDA) &&
                    !is_batch_norm;
  const bool keeps_elements = op.hasTag(at::Tag::inplace_view) || name == "aten::record_stream" ||
                              name == "aten::retain_grad" || name == "aten::set_data";
  // Collectives of torch write what they get, and say nothing of it.
  const bool is_collective = name.starts_with("c10d::") || name.starts_with("_c10d_functional");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if ((is_written(schema.arguments()[i]) && !keeps_elements) || is_collective) facts.writes.push_back(i);
  }
  if (is_batch_norm && facts.writes.empty())
    facts.writes = is_update ? std::vector<size_t>{1, 2} : std::vector<size_t>{3, 4};
  facts.makes_blank = is_one_of(name, kBlank);
  facts.overwrites = is_one_of(name, kOverwriting);
  facts.random = op.hasTag(at::Tag::nondeterministic_seeded);
  facts.pointwise = is_tagged_pointwise(op) || is_one_of(name, kCheap);
  const bool in_place = is_in_place(schema, facts.writes);
  facts.replayable = name.starts_with("aten::") && !is_batch_norm && !facts.makes_blank && !facts.composite &&
                     !is_one_of(name, kWithWorkspace) && !is_one_of(name, kFactories) &&
                     !op.hasTag(at::Tag::inplace_view) && !op.hasTag(at::Tag::maybe_aliasing_or_mutating) &&
                     !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output) &&
                     gives_tensors_alone(schema) && !gives_views(schema) && takes_tensors(schema) &&
                     (facts.writes.empty() || in_place);
  return facts;
}

}  // namespace

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorFacts> known;
  const auto [entry, is_new] = known.try_emplace(&op.schema());
  if (is_new) entry->second = find_facts(op);
  return entry->second;
}

}  // namespace ds::recompute
