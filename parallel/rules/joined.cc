#include "parallel/rules/joined.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <utility>

#include "core/check.h"
#include "core/storage_memory.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {
namespace {

struct Change {
  at::Tensor split;
  at::Tensor whole;  // what the operator changes in its place
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
    part.copy_(sliced(change.whole, placement));
    note_changed_part(change.split, part);
    for (size_t i = 0; i < call.results(); ++i) {
      c10::IValue& result = call.result(i);
      if (result.isTensor() && result.toTensor().is_same(change.whole)) result = change.split;
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
    changes.push_back({.split = tensor, .whole = whole});
    call.set(i, whole);
  }
  replace_split_arguments(call, join);
  call.axis()->note_join(call.name(), split);
  call.run();
  write_back(call, changes);
  refuse_changes_of_views(call, wholes);
}

void run_uncut(Call& call) {
  std::vector<at::Tensor> wholes;
  replace_split_arguments(call, [&](const at::Tensor& tensor) {
    wholes.push_back(part_of(tensor));
    return wholes.back();
  });
  call.run();
  refuse_changes_of_views(call, wholes);
}

}  // namespace ds::parallel
