#include "parallel/rules/rules.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <utility>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {
namespace {

struct Change {
  at::Tensor split;
  at::Tensor whole;  // what the operator changes in its place
  size_t argument = 0;
};

// Operators whose arguments are strides that the program has read from the split tensor.
bool reads_strides(const Call& call) {
  return call.name().find("as_strided") != std::string::npos || call.name() == "aten::_reshape_alias";
}

at::Tensor with_strides_of(const at::Tensor& split, const at::Tensor& whole, const std::string& op) {
  if (whole.strides() == split.strides()) return whole;
  require(split.is_non_overlapping_and_dense(), op, " of a split tensor of sizes ", split.sizes(), " and strides ",
          split.strides(), ", whose elements do not lie side by side, is not supported; call contiguous() first");
  const at::Tensor result = at::empty_strided(split.sizes(), split.strides(), whole.options());
  result.copy_(whole);
  return result;
}

c10::IValue replaced(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return is_split(value.toTensor()) ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list = value.toTensorList();
    bool found = false;
    for (size_t i = 0; i < list.size(); ++i) found = found || is_split(list.get(i));
    if (!found) return value;
    list = list.copy();
    for (size_t i = 0; i < list.size(); ++i) {
      if (is_split(list.get(i))) list.set(i, change(list.get(i)));
    }
    return list;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue& element = list.get(i);
      if (element.isTensor() && is_split(element.toTensor())) list.set(i, change(element.toTensor()));
    }
    return list;
  }
  return value;
}

// Whether a list has split tensors among its elements.
bool has_split(const c10::IValue& list) {
  bool found = false;
  static_cast<void>(replaced(list, [&](const at::Tensor& tensor) {
    found = true;
    return tensor;
  }));
  return found;
}

at::Tensor uncut(const Call& call, const at::Tensor& view) {
  return make_split(view, {.axis = call.axis(), .cut = std::nullopt}, view.sizes());
}

// Results that share memory with a joined tensor.
void refuse_changes_of_views(Call& call, const std::vector<at::Tensor>& wholes) {
  const auto is_view = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || is_split(tensor) || !tensor.has_storage()) return false;
    for (const at::Tensor& whole : wholes) {
      if (whole.has_storage() && is_same_storage(whole.storage(), tensor.storage())) return true;
    }
    return false;
  };
  for (size_t i = 0; i < call.results(); ++i) {
    // Schemas do not tell all: broadcast_tensors() returns views, and has no alias in its schema.
    const c10::AliasInfo* const alias = call.op().schema().returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    c10::IValue& result = call.result(i);
    if (result.isTensor() && is_view(result.toTensor())) {
      result = uncut(call, result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list = result.toTensorList().copy();
      for (size_t k = 0; k < list.size(); ++k) {
        if (is_view(list.get(k))) list.set(k, uncut(call, list.get(k)));
      }
      result = list;
    }
  }
}

void write_back(Call& call, const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    require(change.whole.sizes() == change.split.sizes(), call.name(), " changes the sizes of a split tensor from ",
            change.split.sizes(), " to ", change.whole.sizes(), "; use the form that returns a new tensor");
    const Placement& placement = placement_of(change.split);
    const at::Tensor part = part_of(change.split);
    part.copy_(placement.summed ? used_in_part(change.whole, placement.axis) : sliced(change.whole, placement));
    note_changed_part(change.split, part);
    for (size_t i = 0; i < call.results(); ++i) {
      c10::IValue& result = call.result(i);
      if (result.isTensor() && result.toTensor().is_same(change.whole)) result = change.split;
    }
  }
}

// Every tensor among the arguments, also in lists.
void for_each_tensor(const Call& call, const std::function<void(const at::Tensor&)>& see) {
  for (size_t i = 0; i < call.arguments(); ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor()) {
      if (value.toTensor().defined()) see(value.toTensor());
    } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) see(element.toTensor());
      }
    }
  }
}

// Whether the results of an operator on uncut tensors are summed themselves, so that their gradients need no division
// and may be parts: all that has a gradient is summed.
bool stays_summed(const Call& call) {
  if (!at::GradMode::is_enabled() || call.results() == 0) return false;
  for (size_t i = 0; i < call.arguments(); ++i) {
    // A plain tensor that the operator changes stays one.
    if (call.changes(i) && !is_split(call.given(i))) return false;
  }
  bool any = false;
  bool others = false;
  for_each_tensor(call, [&](const at::Tensor& tensor) {
    const bool summed = is_split(tensor) && placement_of(tensor).summed;
    any = any || summed;
    others = others || (!summed && tensor.requires_grad());
  });
  return any && !others;
}

// Summed tensors that an operator on uncut tensors changes in place: their own memory is changed. What else has a
// gradient is used by each rank for its part of the gradient.
std::vector<Change> changes_of_summed(Call& call) {
  std::vector<Change> changes;
  for (size_t i = 0; i < call.arguments(); ++i) {
    const at::Tensor tensor = call.changes(i) ? call.given(i) : at::Tensor();
    if (!is_split(tensor) || !placement_of(tensor).summed) continue;
    changes.push_back({.split = tensor, .whole = part_of(tensor), .argument = i});
  }
  for (size_t i = 0; i < call.arguments() && !changes.empty(); ++i) {
    const at::Tensor tensor = call.given(i);
    if (tensor.defined() && !is_split(tensor)) call.set(i, used_in_part(tensor, call.axis()));
  }
  return changes;
}

void note_changes_of_summed(Call& call, const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    note_changed_part(change.split, change.whole);
    for (size_t i = 0; i < call.results(); ++i) {
      c10::IValue& result = call.result(i);
      if (result.isTensor() && result.toTensor().is_same(change.whole)) result = change.split;
    }
  }
}

void mark_summed(Call& call) {
  const auto marked = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || is_split(tensor) || !tensor.requires_grad()) return tensor;
    return make_split(tensor, {.axis = call.axis(), .cut = std::nullopt, .summed = true}, tensor.sizes());
  };
  for (size_t i = 0; i < call.results(); ++i) {
    c10::IValue& result = call.result(i);
    if (result.isTensor()) {
      result = marked(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list = result.toTensorList().copy();
      for (size_t k = 0; k < list.size(); ++k) list.set(k, marked(list.get(k)));
      result = list;
    }
  }
}

}  // namespace

void replace_split_arguments(const Call& call, const std::function<at::Tensor(const at::Tensor&)>& change) {
  const size_t first = call.stack().size() - call.arguments();
  for (size_t i = 0; i < call.arguments(); ++i) {
    c10::IValue& value = call.stack()[first + i];
    value = replaced(value, change);
  }
}

void join_operands(Call& call) {
  require(
      !call.op().hasTag(at::Tag::inplace_view), call.name(),
      " changes what a split tensor shows of its memory in place, which is not supported; use the form that returns "
      "a new tensor");
  std::vector<Change> changes;
  std::vector<at::Tensor> wholes;
  std::vector<at::Tensor> split;
  const bool strided = reads_strides(call);
  const auto join = [&](const at::Tensor& tensor) {
    split.push_back(tensor);
    at::Tensor whole = whole_of(tensor);
    if (strided) whole = with_strides_of(tensor, whole, call.name());
    wholes.push_back(whole);
    return whole;
  };
  for (size_t i = 0; i < call.arguments(); ++i) {
    if (!call.changes(i)) continue;
    const at::Tensor tensor = call.given(i);
    if (!is_split(tensor)) {
      require(!has_split(call.argument(i)), call.name(),
              " cannot change lists of split tensors in place; change them one by one, or their leaves");
      continue;
    }
    require_changeable(tensor, call.name());
    // A tensor of its own: the operator may not change what conversions have kept.
    const at::Tensor whole = join(tensor).clone();
    changes.push_back({.split = tensor, .whole = whole, .argument = i});
    call.set(i, whole);
  }
  replace_split_arguments(call, join);
  call.axis()->note_join(call.name(), split);
  call.run();
  write_back(call, changes);
  refuse_changes_of_views(call, wholes);
}

bool is_copy_to_be_read(const Call& call) {
  const std::optional<int> place = call.op().schema().argumentIndexWithName("device");
  if (!place || !call.argument(*place).isDevice() || !call.argument(*place).toDevice().is_cpu()) return false;
  const at::Tensor tensor = call.given(0);
  if (!is_split(tensor)) return false;
  if (!tensor.is_cpu()) return true;
  // Between two places of the CPU the overload with both, which programs write to read, and not to(options).
  if (call.op().operator_name().overload_name != "device") return false;
  const at::ScalarType type = call.argument(*call.op().schema().argumentIndexWithName("dtype")).toScalarType();
  return type == at::kDouble || type == at::kComplexDouble;
}

void run_on_whole(Call& call) {
  replace_split_arguments(call, whole_of);
  call.run();
}

void require_no_new_memory(const Call& call) {
  const at::Tensor parameter = call.given(0);
  if (!is_split(parameter) || (call.arguments() > 1 && parameter.is_same(call.given(1)))) return;
  const std::string name = split_name(parameter);
  require(name.empty() && call.name() != "aten::set_", name.empty() ? "a split tensor" : cat("parameter ", name),
          ": it is split over a tensor axis, and can be given no other memory, dtype or device (model->to(), ",
          "torch::load(), torch::nn::utils::vector_to_parameters(), set_data(), set_()). Move, convert and load the ",
          "model before initialize() or parallelize_module() splits it. To change values, parameter.copy_(values) ",
          "under torch::NoGradGuard, on all ranks, takes each rank's part of the full values");
}

void run_on_addends(Call& call) {
  const auto is_addend = [](const at::Tensor& tensor) { return is_split(tensor) && placement_of(tensor).addend; };
  bool all = true;
  for_each_tensor(call, [&](const at::Tensor& tensor) { all = all && is_addend(tensor); });
  for (size_t i = 0; i < call.arguments(); ++i) {
    require(!call.changes(i) || !is_addend(call.given(i)), call.name(), " would change in place a gradient of which ",
            "each rank has an addend; change a clone() of its whole (ds::parallel::whole)");
  }
  const std::string& name = call.name();
  const bool adds = name == "aten::add" && call.argument(2).isScalar() && call.argument(2).toScalar().equal(1);
  const bool linear = all && (adds || name == "aten::detach" || name == "aten::clone" || name == "aten::alias");
  replace_split_arguments(call, [&](const at::Tensor& tensor) {
    if (!is_addend(tensor)) return tensor;
    return linear ? part_of(tensor) : whole_of(tensor);
  });
  call.run();
  if (!linear) return;
  const at::Tensor result = call.result().toTensor();
  call.result() = make_split(result, {.axis = call.axis(), .cut = std::nullopt, .addend = true}, result.sizes());
}

void run_uncut(Call& call) {
  const std::vector<Change> changes = changes_of_summed(call);
  const bool stays = !changes.empty() || stays_summed(call);
  std::vector<at::Tensor> wholes;
  replace_split_arguments(call, [&](const at::Tensor& tensor) {
    if (placement_of(tensor).summed) return stays ? part_of(tensor) : whole_of(tensor);
    wholes.push_back(part_of(tensor));
    return wholes.back();
  });
  for (const Change& change : changes) call.set(change.argument, change.whole);
  call.run();
  note_changes_of_summed(call, changes);
  if (stays) mark_summed(call);
  refuse_changes_of_views(call, wholes);
}

}  // namespace ds::parallel
