#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

struct Attention {
  Operand query, key, value, mask;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool grouped;  // several heads of queries share one of keys and values
};

Attention attention_of(const Call& call) {
  const auto number = [](const c10::IValue& value) {
    return value.isNone() ? std::optional<double>() : std::optional<double>(value.toDouble());
  };
  return {.query = call.operand(0),
          .key = call.operand(1),
          .value = call.operand(2),
          .mask = call.operand(3),
          .dropout = call.argument(4).toDouble(),
          .causal = call.argument(5).toBool(),
          .scale = number(call.argument(6)),
          .grouped = call.argument(7).toBool()};
}

// Whether x has the batches and heads of the query, so that the result's are those too: broadcasting is left to joined
// tensors.
bool has_batches_of_query(const Attention& attention, const Operand& x) {
  const Sizes& query = attention.query.sizes;
  for (int64_t dim = 0; dim < attention.query.dim() - 2; ++dim) {
    const bool grouped = attention.grouped && dim == attention.query.dim() - 3;
    if (!grouped && x.sizes[dim] != query[dim]) return false;
  }
  return true;
}

bool mask_fits(const Attention& attention) {
  const Operand& mask = attention.mask;
  if (!mask.defined()) return true;
  const int64_t added = attention.query.dim() - mask.dim();
  if (added < 0) return false;
  for (int64_t dim = 0; dim < mask.dim() - 2; ++dim) {
    if (mask.sizes[dim] != 1 && mask.sizes[dim] != attention.query.sizes[added + dim]) return false;
  }
  return true;
}

// The cut that all three take, along batches or heads; nothing where the sequence or a head's elements are cut.
std::optional<Cut> attention_cut(const Call& call, const Attention& attention) {
  const int64_t dims = attention.query.dim();
  const Cut* result = nullptr;
  for (const Operand* x : {&attention.query, &attention.key, &attention.value}) {
    if (x->dim() != dims || elements_of(x->sizes) == 0) return std::nullopt;
    if (x->is_split() && result == nullptr) result = &*x->cut;
  }
  if (dims < 3 || result == nullptr || result->dim >= dims - 2 || !mask_fits(attention)) return std::nullopt;
  const int64_t dim = result->dim;
  for (const Operand* x : {&attention.query, &attention.key, &attention.value}) {
    const bool alike = x->sizes[dim] == attention.query.sizes[dim];
    // A group of heads stays together where parts are even and there is one block.
    const bool grouped = attention.grouped && dim == dims - 3 && result->repeats == 1 && result->blocks.empty() &&
                         is_even(along(*result, dim), x->sizes[dim], call.axis()->size()) &&
                         is_even(along(*result, dim), attention.query.sizes[dim], call.axis()->size());
    if (!has_batches_of_query(attention, *x) || (!alike && !grouped)) return std::nullopt;
  }
  return *result;
}

// Returns the mask as a term that is added to the scores, because the composed attention below knows no boolean masks.
at::Tensor additive(const at::Tensor& mask, const at::Tensor& query) {
  if (!mask.defined() || mask.scalar_type() != at::kBool) return mask;
  return at::zeros_like(mask, query.scalar_type())
      .masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
}

at::Tensor mask_part(const Call& call, const Operand& mask, const Cut& cut, const Operand& query) {
  if (!mask.defined()) return {};
  const int64_t dim = cut.dim - (query.dim() - mask.dim());
  if (dim < 0 || mask.sizes[dim] != query.sizes[cut.dim]) return for_parts(mask, call.axis());
  return part_as(mask, along(cut, dim), call.axis());
}

// Heads on the ranks that have them (Megatron-LM). With dropout the weights of the whole are drawn (rules/random.cc).
Outcome attend(Call& call) {
  const Attention attention = attention_of(call);
  const std::optional<Cut> cut = attention_cut(call, attention);
  if (!cut) return Outcome::kJoin;
  if (attention.dropout > 0) {
    const at::Tensor mask = additive(call.given(3), call.given(0));
    const std::optional<at::Tensor> optional_mask = mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt;
    return call.finish(std::get<0>(at::_scaled_dot_product_attention_math(
        call.given(0), call.given(1), call.given(2), optional_mask, attention.dropout, attention.causal, std::nullopt,
        attention.scale, attention.grouped)));
  }
  const at::Tensor own_mask = mask_part(call, attention.mask, *cut, attention.query);
  const at::Tensor result = at::scaled_dot_product_attention(
      part_as(attention.query, *cut, call.axis()), part_as(attention.key, *cut, call.axis()),
      part_as(attention.value, *cut, call.axis()),
      own_mask.defined() ? std::optional<at::Tensor>(own_mask) : std::nullopt, 0.0, attention.causal, attention.scale,
      attention.grouped);
  Sizes sizes = attention.query.sizes;
  sizes.back() = attention.value.sizes.back();
  return call.finish_split(result, *cut, sizes);
}

}  // namespace

void add_attention_rules(RuleTable& table) { table["aten::scaled_dot_product_attention"] = attend; }

}  // namespace ds::parallel
