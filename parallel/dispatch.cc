#include "parallel/dispatch.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

RuleTable all_rules() {
  RuleTable result;
  add_pointwise_rules(result);
  add_shape_rules(result);
  add_piece_rules(result);
  add_product_rules(result);
  add_lookup_rules(result);
  add_normalization_rules(result);
  add_reduction_rules(result);
  add_attention_rules(result);
  add_loss_rules(result);
  add_random_rules(result);
  return result;
}

// The rule for an operator, and what its schema tells.
struct KnownOperator {
  Rule rule;
  bool composite = false;
  bool copies = false;        // to(): a copy of another dtype, or on another device
  bool gives_memory = false;  // gives the tensor that it changes other memory, or asks whether that is possible
  // The place of the argument beta (baddbmm, addmm, ...). Where it is 0, the first operand may hold anything.
  std::optional<int> beta;
};

KnownOperator look_up(const c10::OperatorHandle& op) {
  static const RuleTable kRules = all_rules();
  KnownOperator result;
  result.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  const c10::OperatorName& name = op.operator_name();
  result.copies = name.name == "aten::to" || name.name == "aten::_to_copy";
  result.beta = op.schema().argumentIndexWithName("beta");
  result.gives_memory = name.name == "aten::set_" || name.name == "aten::_has_compatible_shallow_copy_type";
  // Another overload has other arguments: what none is registered for is decomposed or joined.
  const auto found = kRules.find(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  if (found != kRules.end()) {
    result.rule = found->second;
  } else if (op.hasTag(at::Tag::pointwise) && !is_random) {
    result.rule = compute_pointwise;
  }
  return result;
}

const KnownOperator& known(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, KnownOperator> seen;
  const auto [entry, is_new] = seen.try_emplace(&op.schema());
  if (is_new) entry->second = look_up(op);
  return entry->second;
}

// The axis of the split tensors among the arguments, and whether any of them is cut.
struct FoundAxis {
  std::shared_ptr<Axis> axis;
  bool any_cut = false;
  bool any_addend = false;

  void see(const at::Tensor& tensor) {
    if (!is_split(tensor)) return;
    const Placement& placement = placement_of(tensor);
    if (!axis) axis = axis_of(placement);
    // Models that are split over the same ranks may meet; their tensors are computed along the first one's axis.
    require(axis.get() == placement.axis.get() || axis->has_ranks_of(*axis_of(placement)),
            "an operator got tensors that are split over two axes, of other ranks each, which is not there yet; join "
            "one of them first (ds::parallel::whole)");
    any_cut = any_cut || placement.cut.has_value();
    any_addend = any_addend || placement.addend;
  }
};

FoundAxis find_axis(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  FoundAxis result;
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      result.see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) result.see(tensor);
    } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) result.see(element.toTensor());
      }
    }
  }
  return result;
}

// Whether the first operand may hold anything. `beta`: KnownOperator::beta.
bool ignores_first(const Call& call, std::optional<int> beta) {
  return beta && call.argument(*beta).isScalar() && call.argument(*beta).toScalar().equal(0);
}

// Notes the data that all ranks have to bring alike.
void note_data(const Call& call, std::optional<int> beta) {
  for (size_t i = 0; i < call.arguments(); ++i) {
    const at::Tensor tensor = call.given(i);
    // A tensor that is only written may hold anything before.
    if (!tensor.defined() || is_split(tensor) || tensor.requires_grad() || tensor.dim() == 0 || call.changes(i))
      continue;
    if (i == 0 && ignores_first(call, beta)) continue;
    call.axis()->note_data(tensor);
  }
}

void require_no_change_of_views(const Call& call) {
  for (size_t i = 0; i < call.arguments(); ++i) {
    if (call.changes(i) && is_split(call.given(i))) require_changeable(call.given(i), call.name());
  }
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drop_old_conversion();
  FoundAxis found = find_axis(op, *stack);
  ensure(found.axis != nullptr, "an operator under the key of split tensors has one among its arguments");
  Call call(op, *stack, std::move(found.axis));
  const KnownOperator& own = known(op);
  if (own.gives_memory) require_no_new_memory(call);
  if (own.copies && is_copy_to_be_read(call)) return run_on_whole(call);
  if (call.axis()->watches_data() && at::GradMode::is_enabled()) note_data(call, own.beta);
  if (found.any_addend) return run_on_addends(call);
  if (!found.any_cut) {
    require_no_change_of_views(call);
    return run_uncut(call);
  }
  if (own.rule && call.axis()->verifies() && !is_verifying()) verify_rule(own.rule, call);
  const Outcome outcome = own.rule ? own.rule(call) : Outcome::kNone;
  if (outcome == Outcome::kDone) return;
  if (outcome == Outcome::kNone && own.composite) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    return;
  }
  join_operands(call);
}

}  // namespace

void register_split_operators() {
  // Never destroyed: the dispatcher may be used until the process ends. Used by nobody, and kept where leak checkers
  // find it.
  [[gnu::used]] static torch::Library* const kLibrary = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kSplitKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
    return made;
  }();
}

}  // namespace ds::parallel
