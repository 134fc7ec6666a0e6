#include <ATen/core/grad_mode.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/name_pattern.h"
#include "dsengine/parallel.h"
#include "optim/clip.h"
#include "parallel/axis/collectives.h"
#include "parallel/axis/conversions.h"
#include "parallel/dispatch.h"
#include "parallel/split_module.h"
#include "parallel/summed_gradients.h"

namespace ds::parallel {
namespace {

// Parameters and buffers.
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) result.push_back(buffer);
  return result;
}

// A whole parameter that an autograd function of the program reads beside split tensors gets a split gradient.
void keep_gradient_whole(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return;
  parameter.register_hook([](const at::Tensor& gradient) { return whole_of(gradient); });
}

// A whole parameter whose gradient each rank has a part of.
at::Tensor summed_leaf(const at::Tensor& parameter, const std::shared_ptr<Axis>& axis, ParameterSplit& split) {
  split.summed = true;
  split.reason += "; its gradient is a sum over the ranks";
  return split_parameter(parameter, {.axis = axis, .cut = std::nullopt, .summed = true}, parameter.detach(),
                         split.name);
}

// Note [Gradients of split parameters]
// A split parameter's leaf alone gets gradients, and torch's habits go over model->parameters(): an optimizer made
// before the split, model->zero_grad(), torch::nn::utils::clip_grad_norm_(). None of them would do anything to parts,
// without a word. So from the first gradient of its leaf on, .grad of the parameter is a tensor that throws when its
// memory is read. zero_grad() takes it away unread: the leaf's next gradient finds it gone, and would be added to what
// should be no more. The engine shows tensors of its own there (engine/update/shown_gradients.h).
struct ShownGradient {
  std::string parameter;
  at::Tensor tensor;
  bool shown = false;
};

void show_gradient(const at::Tensor& parameter, const at::Tensor& leaf, ShownGradient& own) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (own.shown && !gradient.defined() && leaf.grad().defined() && has_memory(leaf.grad())) {
    require(leaf.grad().count_nonzero().item<int64_t>() == 0, "backward(): parameter ", own.parameter,
            ": its .grad was taken away, by model->zero_grad() or an optimizer over model->parameters(). It is split "
            "over ranks, so that its gradient is that of its leaf, which is still there, and the next one would be "
            "added to it. Expected split.zero_grad(), or zero_grad() of an optimizer over split.leaves()");
  }
  if (!gradient.defined()) gradient = own.tensor;
  own.shown = true;
}

void watch_gradient(const std::string& name, const at::Tensor& parameter, const at::Tensor& leaf) {
  if (!parameter.is_floating_point()) return;
  auto own = std::make_shared<ShownGradient>();
  own->parameter = name;
  own->tensor = unreadable_tensor(
      leaf, parameter.sizes(),
      cat("the gradient of parameter ", name, " cannot be read by its .grad: the parameter is split over ranks, and ",
          "each has that of its leaf. Make optimizers over split.leaves() after the split; clip with ",
          "split.clip_grad_norm_(max_norm) in place of torch::nn::utils::clip_grad_norm_(); drop gradients with ",
          "split.zero_grad(). ds::parallel::local_part(parameter).grad() is this rank's part"));
  const auto weak = [](const at::Tensor& tensor) { return c10::weak_intrusive_ptr(tensor.getIntrusivePtr()); };
  // A frozen leaf takes no hook.
  const bool trained = leaf.requires_grad();
  leaf.set_requires_grad(true);
  leaf.register_hook([own, of_parameter = weak(parameter), of_leaf = weak(leaf)](const at::Tensor& gradient) {
    const auto living = of_parameter.lock();
    const auto living_leaf = of_leaf.lock();
    if (living && living_leaf) show_gradient(at::Tensor(living), at::Tensor(living_leaf), *own);
    return gradient;
  });
  leaf.set_requires_grad(trained);
}

Cut cut_along(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& blocks) {
  const int64_t wrapped = dim < 0 ? dim + tensor.dim() : dim;
  require(wrapped >= 0 && wrapped < tensor.dim(), "a tensor of sizes ", tensor.sizes(), " has no dimension ", dim,
          " to be cut along");
  const Cut cut{.dim = wrapped, .blocks = blocks};
  const std::string problem = cut_problem(cut, tensor.size(wrapped));
  require(problem.empty(), "a cut along dimension ", dim, ": ", problem);
  return cut;
}

// A tied parameter is meant by any of its names: what a rule says of one holds for those that no rule matches.
void share_rules(const torch::OrderedDict<std::string, at::Tensor>& parameters, SplitPlan& plan) {
  std::unordered_map<const c10::TensorImpl*, size_t> ruled;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (plan[i].by_rule) ruled.try_emplace(parameters[i].value().unsafeGetTensorImpl(), i);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = ruled.find(parameters[i].value().unsafeGetTensorImpl());
    if (plan[i].by_rule || found == ruled.end()) continue;
    const std::string name = plan[i].name;
    plan[i] = plan[found->second];
    plan[i].name = name;
    plan[i].reason += cat(", of ", plan[found->second].name, ", which is the same tensor");
  }
}

}  // namespace

SplitPlan plan_module(const torch::nn::Module& module, const std::vector<SplitRule>& rules, int ranks,
                      const std::vector<NamedShape>& elsewhere) {
  const auto parameters = module.named_parameters();
  std::vector<NamedShape> shapes;
  for (const auto& entry : parameters) {
    require(!ds::is_split(entry.value()), "parameter ", entry.key(), " is split already");
    shapes.push_back({.name = entry.key(), .sizes = entry.value().sizes().vec()});
  }
  shapes.insert(shapes.end(), elsewhere.begin(), elsewhere.end());
  SplitPlan plan = plan_splits(shapes, rules, ranks);
  share_rules(parameters, plan);
  std::unordered_map<const c10::TensorImpl*, const ParameterSplit*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto [entry, is_new] = seen.try_emplace(parameters[i].value().unsafeGetTensorImpl(), &plan[i]);
    const ParameterSplit& first = *entry->second;
    require(is_new || (first.dim == plan[i].dim && first.blocks == plan[i].blocks && first.grain == plan[i].grain &&
                       first.join_output == plan[i].join_output),
            "parameters ", first.name, " and ", plan[i].name,
            " are one tensor, but the rules split them otherwise: ", first.reason, "; ", plan[i].reason,
            ". Give both one rule (.split, or tensor_parallel.partition_config.layer_specs), or set ",
            "tensor_parallel.vocab_parallel_lm_head: false where one of them is the head");
  }
  return plan;
}

std::shared_ptr<Axis> make_axis(std::shared_ptr<comm::Communicator> communicator) {
  auto result = std::make_shared<Axis>(std::move(communicator));
  if (result->size() > 1) register_split_operators();
  return result;
}

std::vector<SplitRule> declared_splits(const torch::nn::Module& module) {
  std::vector<SplitRule> result;
  const auto declare = [&](const std::string& name, const torch::nn::Module& inner) {
    const auto* const declaring = dynamic_cast<const HasSplits*>(&inner);
    if (declaring == nullptr) return;
    for (SplitRule& rule : declaring->splits()) {
      if (!name.empty())
        rule.pattern = regex_of_text(name) + (rule.pattern.empty() ? "" : "\\.(?:" + rule.pattern + ")");
      result.push_back(std::move(rule));
    }
  };
  declare("", module);
  for (const auto& entry : module.named_modules("", /*include_self=*/false)) declare(entry.key(), *entry.value());
  return result;
}

std::vector<at::Tensor> SplitModule::leaves() const {
  std::vector<at::Tensor> result;
  for (const auto& [name, leaf] : named_leaves) result.push_back(leaf);
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> SplitModule::summed_leaves() const {
  std::set<std::string> summed;
  for (const ParameterSplit& parameter : plan) {
    if (parameter.summed) summed.insert(parameter.name);
  }
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& leaf : named_leaves) {
    if (summed.contains(leaf.first)) result.push_back(leaf);
  }
  return result;
}

void SplitModule::reduce_summed_gradients() const {
  if (summed_gradients) summed_gradients->reduce();
}

void SplitModule::zero_grad() const {
  for (const auto& [name, leaf] : named_leaves) leaf.mutable_grad().reset();
}

double SplitModule::clip_grad_norm_(double max_norm) const {
  require(max_norm > 0, "clip_grad_norm_() needs a norm above 0, found ", max_norm);
  if (named_leaves.empty()) return 0;
  reduce_summed_gradients();
  const at::NoGradGuard no_grad;
  std::set<std::string> split;
  for (const ParameterSplit& parameter : plan) {
    if (parameter.is_split()) split.insert(parameter.name);
  }
  // Squares of split and of replicated parameters; every rank takes part in the sum, whether it has gradients or not.
  const at::TensorOptions options = named_leaves[0].second.options().dtype(at::kDouble);
  at::Tensor of_parts = at::zeros({}, options);
  at::Tensor of_wholes = at::zeros({}, options);
  for (const auto& [name, leaf] : named_leaves) {
    if (!leaf.grad().defined()) continue;
    const at::Tensor square = at::linalg_vector_norm(leaf.grad(), 2, std::nullopt, false, at::kDouble).square();
    (split.contains(name) ? of_parts : of_wholes).add_(square.to(options.device()));
  }
  if (axis->size() > 1) of_parts = all_reduce_sum(of_parts, *axis);
  const double norm = std::sqrt((of_parts + of_wholes).item<double>());
  optimizers::clip_to_norm(leaves(), norm, max_norm);
  return norm;
}

std::vector<JoinedOperator> SplitModule::joined_operators() const { return axis->joined_operators(); }
void SplitModule::reset_joined_operators() const { axis->reset_joined_operators(); }

SplitModule split_module(torch::nn::Module& module, std::shared_ptr<Axis> axis, SplitPlan plan, const PartOf& part_of) {
  SplitModule result{.axis = std::move(axis), .plan = std::move(plan), .named_leaves = {}};
  if (result.axis->cuts_sequences() && result.axis->size() > 1) {
    result.summed_gradients = std::make_shared<SummedGradients>(result.axis);
  }
  const auto parameters = module.named_parameters();
  std::set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i].pair();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    ParameterSplit& split = result.plan[i];
    at::Tensor leaf = parameter;
    if (split.is_split()) {
      const Placement placement{.axis = result.axis,
                                .cut = Cut{.dim = split.dim, .blocks = split.blocks, .grain = split.grain}};
      leaf = split_parameter(parameter, placement, part_of(name, parameter, placement), name);
      if (split.join_output) mark_joins_output(parameter);
    } else if (result.summed_gradients && parameter.is_floating_point()) {
      leaf = summed_leaf(parameter, result.axis, split);
      result.summed_gradients->watch(name, leaf);
    } else if (result.axis->size() > 1) {
      keep_gradient_whole(parameter);
    }
    result.named_leaves.emplace_back(name, leaf);
  }
  return result;
}

SplitModule split_with_values_of_rank_0(torch::nn::Module& module, const std::shared_ptr<Axis>& axis, SplitPlan plan) {
  for (const auto& item : module.named_parameters()) {
    require(!item.value().is_meta(), "parallelize_module: parameter ", item.key(), " is on the meta device: expected ",
            "values to give parts of. Build the module with memory; engine::initialize splits one on the meta device, ",
            "by tensor_parallel.autotp_size and .weights");
  }
  comm::broadcast_values(tensors_of(module), /*root=*/0, axis->communicator(), "values");  // rank 0's
  SplitModule result =
      split_module(module, axis, std::move(plan),
                   [](const std::string& /*name*/, const at::Tensor& parameter, const Placement& placement) {
                     // A tensor of its own: the whole's memory is given back.
                     return slice_of(parameter.detach(), placement).clone();
                   });
  const auto parameters = module.named_parameters();
  for (const auto& [name, leaf] : result.named_leaves) {
    if (ds::is_split(parameters[name])) watch_gradient(name, parameters[name], leaf);
  }
  return result;
}

SplitModule parallelize_module(torch::nn::Module& module, std::shared_ptr<comm::Communicator> communicator,
                               const std::vector<SplitRule>& rules, const ParallelizeOptions& options) {
  const std::shared_ptr<Axis> axis = make_axis(std::move(communicator));
  axis->verify(options.verify);
  axis->overlap(options.overlap);
  axis->cut_sequences(options.sequence_parallel);
  std::vector<SplitRule> all_rules = rules;
  for (SplitRule& declared : declared_splits(module)) all_rules.push_back(std::move(declared));
  return split_with_values_of_rank_0(module, axis, plan_module(module, all_rules, axis->size()));
}

at::Tensor distribute(const at::Tensor& tensor, const std::shared_ptr<Axis>& axis, int64_t dim,
                      const std::vector<int64_t>& blocks) {
  require(axis != nullptr, "distribute() needs an axis");
  if (axis->size() == 1) return tensor;
  if (ds::is_split(tensor)) return redistribute(tensor, dim, blocks);
  const Placement placement{.axis = axis, .cut = cut_along(tensor, dim, blocks)};
  return make_split(sliced(tensor, placement).clone(at::MemoryFormat::Contiguous), placement, tensor.sizes());
}

at::Tensor redistribute(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& blocks) {
  if (!ds::is_split(tensor)) return tensor;
  const Placement& placement = placement_of(tensor);
  const Cut cut = normalized(cut_along(tensor, dim, blocks), tensor.size(cut_along(tensor, dim, blocks).dim),
                             placement.axis->size());
  if (placement.summed) {
    const Placement placed{.axis = placement.axis, .cut = cut};
    return make_split(sliced_of_summed(part_of(tensor), placed).clone(at::MemoryFormat::Contiguous), placed,
                      tensor.sizes());
  }
  if (!placement.cut) return distribute(part_of(tensor), axis_of(placement), dim, blocks);
  return make_split(exchanged(part_of(tensor), placement, cut, tensor.sizes()), {.axis = placement.axis, .cut = cut},
                    tensor.sizes());
}

at::Tensor whole(const at::Tensor& tensor) { return whole_of(tensor); }
at::Tensor local_part(const at::Tensor& tensor) { return ds::is_split(tensor) ? part_of(tensor) : tensor; }
bool is_split(const at::Tensor& tensor) { return ds::is_split(tensor); }

}  // namespace ds::parallel
