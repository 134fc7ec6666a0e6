#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "parallel/axis/conversions.h"
#include "parallel/axis/sequence_axis.h"
#include "parallel/rules/dtypes.h"
#include "parallel/rules/rules.h"
#include "parallel/sequence/pieces_attention.h"

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

// With dropout the weights of the whole are drawn (rules/random.cc), so that the result is that of one process.
at::Tensor attend_with_dropout(const Call& call, const Attention& attention, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value) {
  const at::Tensor mask = additive(call.given(3), call.given(0));
  const std::optional<at::Tensor> optional_mask = mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt;
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, optional_mask, attention.dropout,
                                                            attention.causal, std::nullopt, attention.scale,
                                                            attention.grouped));
}

Sizes result_sizes(const Attention& attention) {
  Sizes sizes = attention.query.sizes;
  sizes.back() = attention.value.sizes.back();
  return sizes;
}

// Heads on the ranks that have them (Megatron-LM).
Outcome attend_on_heads(Call& call, const Attention& attention, const Cut& cut) {
  if (attention.dropout > 0) {
    return call.finish(attend_with_dropout(call, attention, call.given(0), call.given(1), call.given(2)));
  }
  const at::Tensor own_mask = mask_part(call, attention.mask, cut, attention.query);
  const at::Tensor result = at::scaled_dot_product_attention(
      part_as(attention.query, cut, call.axis()), part_as(attention.key, cut, call.axis()),
      part_as(attention.value, cut, call.axis()),
      own_mask.defined() ? std::optional<at::Tensor>(own_mask) : std::nullopt, 0.0, attention.causal, attention.scale,
      attention.grouped);
  return call.finish_split(result, cut, result_sizes(attention));
}

// ---- positions that are cut ----

int64_t heads_of(const Operand& x) { return x.dim() >= 3 ? x.sizes[x.dim() - 3] : 1; }

// Whether keys and values are of the positions of the queries, with heads and channels that the exchanges know.
bool is_self_attention(const Call& call, const Attention& attention) {
  const Operand& query = attention.query;
  const int64_t rows = query.dim() - 2;
  const Cut& cut = *query.cut;
  const bool fits = attention.key.sizes == attention.value.sizes && attention.key.sizes[rows] == query.sizes[rows] &&
                    attention.key.sizes[rows + 1] == query.sizes[rows + 1] &&
                    heads_of(query) % heads_of(attention.key) == 0;
  const int ranks = call.axis()->size();
  return fits && cut.repeats == 1 && cut.blocks.size() <= 1 &&
         part_extent(cut, query.sizes[rows], ranks - 1, ranks) > 0;
}

enum class SequenceWay : uint8_t { kUlysses, kRing, kGatherKeys };

// The text of errors: the setting is the engine's or make_sequence_axis()'s.
constexpr const char* kSetting = "sequence_parallel.attention (SequenceAxisOptions::attention)";

SequenceWay way_of(const Call& call, const Attention& attention, SequenceMethod method) {
  if (attention.mask.defined() || !is_self_attention(call, attention)) return SequenceWay::kGatherKeys;
  const int64_t heads = heads_of(attention.query);
  const int64_t key_heads = heads_of(attention.key);
  const int ranks = call.axis()->size();
  const bool divides = heads % ranks == 0 && key_heads % ranks == 0;
  require(method != SequenceMethod::kRing || attention.dropout == 0, call.name(), ": expected dropout_p 0 with ",
          kSetting, " ring, found ", attention.dropout, ": no rank has the weights of all keys at once. Use ulysses");
  require(method != SequenceMethod::kUlysses || heads >= ranks, call.name(), ": expected a head of queries for each ",
          "of the ", ranks, " ranks of the sequence with ", kSetting, " ulysses, found ", heads, ". Use ring");
  if (attention.dropout > 0) {
    const bool has_heads = divides || (heads == key_heads && heads >= ranks);
    return has_heads ? SequenceWay::kUlysses : SequenceWay::kGatherKeys;
  }
  if (method == SequenceMethod::kAuto) return divides ? SequenceWay::kUlysses : SequenceWay::kRing;
  return method == SequenceMethod::kUlysses ? SequenceWay::kUlysses : SequenceWay::kRing;
}

// A tensor that autocast would give to the operator, as [batch, heads, rows, channels].
at::Tensor in_batches(const at::Tensor& part) {
  const at::Tensor cast = under_autocast(part)
                              ? at::autocast::cached_cast(at::autocast::get_autocast_dtype(part.device().type()), part,
                                                          part.device().type())
                              : part;
  const int64_t heads = part.dim() >= 3 ? part.size(-3) : 1;
  return cast.reshape({-1, heads, part.size(-2), part.size(-1)});
}

Outcome attend_to_all_ranks(Call& call, const Attention& attention, SequenceWay way) {
  const Cut& cut = *attention.query.cut;
  const auto own = [&](const Operand& x) { return in_batches(part_as(x, cut, call.axis())); };
  const auto channels = static_cast<double>(attention.query.sizes.back());
  const AttentionInputs inputs{.query = own(attention.query),
                               .key = own(attention.key),
                               .value = own(attention.value),
                               .scale = attention.scale.value_or(1.0 / std::sqrt(channels))};
  PositionPieces pieces = PositionPieces::of_cut(attention.query.sizes[cut.dim], cut, call.axis()->size());
  const SeenPositions seen{.causal = attention.causal, .window = 0, .documents = {}};
  comm::Communicator& group = call.axis()->communicator();
  const at::Tensor result = way == SequenceWay::kRing ? ring_over_pieces(inputs, std::move(pieces), seen, &group)
                                                      : ulysses_over_pieces(inputs, pieces, seen, /*dropout=*/0, group);
  const Sizes sizes = result_sizes(attention);
  std::vector<int64_t> part(sizes.begin(), sizes.end());
  part[cut.dim] = result.size(2);
  return call.finish_split(result.reshape(part), cut, sizes);
}

// Which keys the queries of this rank see, bool [own rows, keys].
at::Tensor causal_rows(const Call& call, const Attention& attention) {
  const Operand& query = attention.query;
  const int64_t rows = query.sizes[query.cut->dim];
  std::vector<at::Tensor> positions;
  for (const DimRange& range :
       TensorPart({rows}, along(*query.cut, 0), call.axis()->rank(), call.axis()->size()).ranges()) {
    positions.push_back(at::arange(range.begin, range.begin + range.length, query.tensor.options().dtype(at::kLong)));
  }
  const int64_t keys = attention.key.sizes[attention.key.dim() - 2];
  return at::cat(positions).unsqueeze(1).ge(at::arange(keys, query.tensor.options().dtype(at::kLong)));
}

// Each rank gathers keys and values, and attends with its own queries.
Outcome attend_to_gathered_keys(Call& call, const Attention& attention) {
  const Cut& cut = *attention.query.cut;
  at::Tensor mask = mask_part(call, attention.mask, cut, attention.query);
  if (attention.causal) mask = causal_rows(call, attention);
  const at::Tensor result = at::scaled_dot_product_attention(
      attention.query.tensor, for_parts(attention.key, call.axis()), for_parts(attention.value, call.axis()),
      mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt, 0.0, /*is_causal=*/false, attention.scale,
      attention.grouped);
  return call.finish_split(result, cut, result_sizes(attention));
}

// Dropout over heads of the whole sequence, or over rows of queries, of a split tensor each.
Outcome attend_to_sequence_with_dropout(Call& call, const Attention& attention, SequenceWay way) {
  std::vector<at::Tensor> qkv = {call.given(0), call.given(1), call.given(2)};
  const Cut& cut = *attention.query.cut;
  for (size_t i = 0; i < qkv.size(); ++i) {
    if (way == SequenceWay::kUlysses) {
      const Operand x = call.operand(i);
      const Cut heads = normalized({.dim = x.dim() - 3, .blocks = {}}, heads_of(x), call.axis()->size());
      qkv[i] = call.split(part_as(x, heads, call.axis()), heads, x.sizes);
    } else if (i > 0) {
      qkv[i] = whole_of(qkv[i]);
    }
  }
  const at::Tensor result = attend_with_dropout(call, attention, qkv[0], qkv[1], qkv[2]);
  return call.finish_split(part_as(operand_of(result), cut, call.axis()), cut, result_sizes(attention));
}

// The cut goes through the positions of the queries, and what comes of it is known.
bool has_cut_positions(const Attention& attention) {
  const Operand& query = attention.query;
  if (!query.is_split() || query.dim() < 2 || query.cut->dim != query.dim() - 2 || !mask_fits(attention)) return false;
  if (attention.mask.defined() && attention.causal) return false;  // an error of LibTorch's
  if (attention.dropout > 0 && query.dim() < 3) return false;
  for (const Operand* x : {&query, &attention.key, &attention.value}) {
    if (x->dim() != query.dim() || elements_of(x->sizes) == 0 || !has_batches_of_query(attention, *x)) return false;
  }
  return true;
}

// On heads or batches that are cut; else, along a sequence axis, over positions, as dsengine/sequence_attention.h says.
Outcome attend(Call& call) {
  const Attention attention = attention_of(call);
  if (const std::optional<Cut> cut = attention_cut(call, attention)) return attend_on_heads(call, attention, *cut);
  const auto* const axis = dynamic_cast<const SequenceAxis*>(call.axis().get());
  if (axis == nullptr || !has_cut_positions(attention)) return Outcome::kJoin;
  const SequenceWay way = way_of(call, attention, axis->options().attention);
  if (attention.dropout > 0) return attend_to_sequence_with_dropout(call, attention, way);
  if (way == SequenceWay::kGatherKeys) return attend_to_gathered_keys(call, attention);
  return attend_to_all_ranks(call, attention, way);
}

}  // namespace

void add_attention_rules(RuleTable& table) { table["aten::scaled_dot_product_attention"] = attend; }

}  // namespace ds::parallel
