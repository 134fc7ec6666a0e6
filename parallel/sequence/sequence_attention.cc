// The public calls of sequence_attention.h: ring attention, Ulysses, and the positions of a rank.
#include "dsengine/sequence_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/split/tensor_part.h"
#include "core/tensor_check.h"
#include "dsengine/collectives.h"
#include "parallel/sequence/position_pieces.h"
#include "parallel/sequence/score_block.h"

namespace ds::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRing = "ring_attention";
constexpr const char* kUlysses = "ulysses_attention";

// ---- arguments ----

void require_inputs(const char* call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  for (const at::Tensor* x : {&q, &k, &v}) {
    require(x->defined() && x->dim() == 4 && x->is_floating_point() && x->numel() > 0, call,
            ": expected q, k and v of [batch, heads, positions, channels], found ", ds::describe(*x));
    require(!is_split(*x), call,
            ": expected full tensors, found one that is split over a tensor axis: a sequence axis ",
            "beside a tensor axis is not supported");
  }
  const bool fit = k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(2) == k.size(2) && q.size(3) == k.size(3);
  require(fit, call, ": expected k and v of equal sizes, with q's batch, positions and channels, found q ",
          ds::describe(q), ", k ", ds::describe(k), ", v ", ds::describe(v));
  require(q.size(1) % k.size(1) == 0, call, ": expected heads of q that are a multiple of those of k and v, found ",
          q.size(1), " and ", k.size(1));
  const bool alike = q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type() &&
                     q.device() == k.device() && k.device() == v.device();
  require(alike, call, ": expected q, k and v of one dtype on one device, found q ", ds::describe(q), ", k ",
          ds::describe(k), ", v ", ds::describe(v));
}

at::Tensor checked_documents(const char* call, const at::Tensor& documents, int64_t batch, int64_t positions) {
  if (!documents.defined()) return documents;
  const bool fits = documents.is_cpu() && documents.scalar_type() == at::kLong &&
                    (documents.dim() == 1 || (documents.dim() == 2 && documents.size(0) == batch)) &&
                    documents.size(-1) == positions;
  require(fits, call, ": documents: expected int64 [", positions, "] or [", batch, ", ", positions,
          "] on the CPU, one number for each position of the whole sequence, found ", ds::describe(documents));
  return documents.dim() == 1 ? documents.unsqueeze(0) : documents;
}

SeenPositions seen_of(const char* call, const SequenceAttentionOptions& options, int64_t batch, int64_t positions) {
  require(options.window >= 0, call, ": window: expected 0 or more, found ", options.window);
  require(options.dropout >= 0.0 && options.dropout < 1.0, call,
          ": dropout: expected 0 or more, and less than 1, found ", options.dropout);
  return {.causal = options.causal,
          .window = options.window,
          .documents = checked_documents(call, options.documents, batch, positions)};
}

double scale_of(const SequenceAttentionOptions& options, const at::Tensor& q) {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
}

// ---- ring attention ----

// What the passes of one attention share; the tensors are saved by autograd.
struct Ring : torch::CustomClassHolder {
  Ring(PositionPieces of_ranks, SeenPositions seen_by_queries, double of_scores, comm::Communicator* of_group)
      : pieces(std::move(of_ranks)), seen(std::move(seen_by_queries)), scale(of_scores), group(of_group) {}

  int rank() const { return group == nullptr ? 0 : group->rank(); }
  int size() const { return group == nullptr ? 1 : group->size(); }
  // The rank whose keys and values are here after `hop` hops.
  int source(int hop) const { return (rank() - hop + size()) % size(); }
  std::vector<ScoreBlock> blocks(int hop) const {
    return seen_blocks(pieces.of_rank(rank()), pieces.of_rank(source(hop)), seen);
  }

  PositionPieces pieces;
  SeenPositions seen;
  double scale;
  comm::Communicator* group;  // null: one rank has the whole sequence
};

// A tensor on its way from the rank before.
struct Hop {
  at::Tensor arriving, leaving;
  comm::Work work;

  at::Tensor arrived() {
    work.wait();
    leaving = at::Tensor();
    return arriving;
  }
};

// Sends [2, batch, heads, rows, channels] to the next rank; what comes has the rows of the rank that it is from.
Hop begin_hop(const Ring& ring, const at::Tensor& leaving, int hop, const char* label) {
  std::vector<int64_t> sizes = leaving.sizes().vec();
  sizes[3] = ring.pieces.rows(ring.source(hop + 1));
  Hop result{.arriving = at::empty(sizes, leaving.options()), .leaving = leaving, .work = {}};
  const auto ranks = static_cast<size_t>(ring.size());
  std::vector<int64_t> sent(ranks, 0);
  std::vector<int64_t> received(ranks, 0);
  sent[static_cast<size_t>((ring.rank() + 1) % ring.size())] = leaving.numel();
  received[static_cast<size_t>((ring.rank() + ring.size() - 1) % ring.size())] = result.arriving.numel();
  result.work = ring.group->all_to_all(result.arriving.view(-1), leaving.view(-1), received, sent, label);
  return result;
}

// Sends keys and values around: calls `use` with the number of a hop and the keys and values that are here then, while
// those of the next hop are on their way.
template <class Use>
void for_each_hop(const Ring& ring, const at::Tensor& keys, const at::Tensor& values, const Use& use) {
  at::Tensor keys_values = at::stack({keys, values});
  for (int hop = 0; hop < ring.size(); ++hop) {
    const bool goes_on = hop + 1 < ring.size();
    Hop next;
    if (goes_on) next = begin_hop(ring, keys_values, hop, "keys and values of ring_attention");
    use(hop, keys_values);
    if (goes_on) keys_values = next.arrived();
  }
}

AttentionInputs inputs_of(const Ring& ring, const at::Tensor& q, const at::Tensor& keys_values) {
  return {.query = q, .key = keys_values[0], .value = keys_values[1], .scale = ring.scale};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<Ring>& ring) {
    SeenSum sum(q);
    for_each_hop(*ring, k, v, [&](int hop, const at::Tensor& keys_values) {
      const AttentionInputs inputs = inputs_of(*ring, q, keys_values);
      for (const ScoreBlock& block : ring->blocks(hop)) sum.add(inputs, block);
    });
    const at::Tensor out = sum.out().to(q.scalar_type());
    context->save_for_backward({q, k, v, out, sum.log_sum()});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(), kRing, ": expected a backward pass without create_graph, its kernels have no ",
            "second derivative");
    const variable_list saved = context->get_saved_variables();
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(context->saved_data["ring"].toCapsule());
    const at::Tensor& q = saved[0];
    const AttentionResult result{.out = saved[3], .log_sum = saved[4], .gradient = gradients[0].contiguous()};
    const at::TensorOptions wide = q.options().dtype(sum_type(q));
    const at::Tensor of_query = at::zeros(q.sizes(), wide);
    Hop sums;  // of the gradients of the keys and values that come next
    for_each_hop(*ring, saved[1], saved[2], [&](int hop, const at::Tensor& keys_values) {
      const at::Tensor own = at::zeros(keys_values.sizes(), wide);
      const AttentionInputs inputs = inputs_of(*ring, q, keys_values);
      for (const ScoreBlock& block : ring->blocks(hop)) {
        add_block_gradients(inputs, result, block, {.query = of_query, .key = own[0], .value = own[1]});
      }
      if (hop > 0) own.add_(sums.arrived());
      sums = ring->size() == 1 ? Hop{.arriving = own, .leaving = {}, .work = {}}
                               : begin_hop(*ring, own, hop, "gradients of keys and values of ring_attention");
    });
    const at::Tensor of_keys_values = sums.arrived().to(q.scalar_type());
    return {of_query.to(q.scalar_type()), of_keys_values[0], of_keys_values[1], {}};
  }
};

// ---- Ulysses ----

// Which heads of queries a rank attends with, and the heads of keys that these see.
struct HeadRange {
  int64_t query, queries;
  int64_t key, keys;
};

HeadRange heads_of(int rank, int ranks, int64_t queries, int64_t keys) {
  const int64_t group = queries / keys;
  const DimRange own = chunk_of(queries, /*grain=*/1, rank, ranks);
  const int64_t first_key = own.begin / group;
  const int64_t last_key = (own.begin + own.length - 1) / group;
  return {.query = own.begin, .queries = own.length, .key = first_key, .keys = last_key - first_key + 1};
}

// From [batch, heads, rows, channels] of some heads to rows of one head, position and batch entry.
at::Tensor as_rows(const at::Tensor& heads) { return heads.transpose(0, 1).reshape({-1, heads.size(3)}); }

at::Tensor from_rows(const at::Tensor& rows, int64_t heads, int64_t batch) {
  return rows.reshape({heads, batch, -1, rows.size(1)}).transpose(0, 1);
}

struct Ulysses {
  comm::Communicator& group;
  const PositionPieces& pieces;
  std::vector<HeadRange> heads;  // of each rank
  int64_t batch;

  const HeadRange& own() const { return heads[static_cast<size_t>(group.rank())]; }
  // Rows of the exchange between this rank and another one, of `heads` heads that have positions of `rank`.
  int64_t rows(int64_t of_heads, int rank) const { return of_heads * batch * pieces.rows(rank); }
};

// The order of positions behind one another of all ranks' rows, as in the sequence; rows for `to_ranks`.
at::Tensor reordered(const at::Tensor& tensor, const PositionPieces& pieces, int ranks, int64_t dim, bool to_ranks) {
  std::vector<std::pair<int64_t, at::Tensor>> parts;
  int64_t row = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const PositionPiece& piece : pieces.of_rank(rank)) {
      parts.emplace_back(to_ranks ? row : piece.first, tensor.narrow(dim, to_ranks ? piece.first : row, piece.count));
      row += piece.count;
    }
  }
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<at::Tensor> sorted;
  for (auto& part : parts) sorted.push_back(std::move(part.second));
  return at::cat(sorted, dim);
}

// Gives this rank its heads of q, k and v, of the whole sequence.
std::vector<at::Tensor> heads_of_whole(const Ulysses& u, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v) {
  std::vector<at::Tensor> leaving;
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  const int64_t own_heads = u.own().queries + 2 * u.own().keys;
  for (int rank = 0; rank < u.group.size(); ++rank) {
    const HeadRange& heads = u.heads[static_cast<size_t>(rank)];
    leaving.push_back(as_rows(at::cat({q.narrow(1, heads.query, heads.queries), k.narrow(1, heads.key, heads.keys),
                                       v.narrow(1, heads.key, heads.keys)},
                                      1)));
    sent.push_back(u.rows(heads.queries + 2 * heads.keys, u.group.rank()));
    received.push_back(u.rows(own_heads, rank));
  }
  const at::Tensor rows = all_to_all(at::cat(leaving), u.group, received, sent);
  std::vector<at::Tensor> arrived;
  for (const at::Tensor& part : rows.split_with_sizes(received)) {
    arrived.push_back(from_rows(part, own_heads, u.batch));
  }
  const at::Tensor whole = reordered(at::cat(arrived, 2), u.pieces, u.group.size(), 2, /*to_ranks=*/false);
  return whole.split_with_sizes({u.own().queries, u.own().keys, u.own().keys}, 1);
}

// Gives this rank all heads of its positions.
at::Tensor positions_of_whole(const Ulysses& u, const at::Tensor& heads) {
  const at::Tensor by_rank = reordered(heads, u.pieces, u.group.size(), 2, /*to_ranks=*/true);
  std::vector<at::Tensor> leaving;
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  int64_t row = 0;
  for (int rank = 0; rank < u.group.size(); ++rank) {
    leaving.push_back(as_rows(by_rank.narrow(2, row, u.pieces.rows(rank))));
    row += u.pieces.rows(rank);
    sent.push_back(u.rows(u.own().queries, rank));
    received.push_back(u.rows(u.heads[static_cast<size_t>(rank)].queries, u.group.rank()));
  }
  const at::Tensor rows = all_to_all(at::cat(leaving), u.group, received, sent);
  return from_rows(rows, u.heads.back().query + u.heads.back().queries, u.batch);
}

// Repeats heads of keys where this rank's heads of queries do not take whole groups of them.
at::Tensor for_own_queries(const Ulysses& u, const at::Tensor& keys, int64_t group) {
  const HeadRange& own = u.own();
  if (own.query % group == 0 && own.queries == own.keys * group) return keys;
  std::vector<int64_t> head_of_query;
  for (int64_t head = own.query; head < own.query + own.queries; ++head)
    head_of_query.push_back(head / group - own.key);
  std::vector<at::Tensor> heads;
  for (const int64_t head : head_of_query) heads.push_back(keys.narrow(1, head, 1));
  return at::cat(heads, 1);
}

at::Tensor attend_to_whole(const std::vector<at::Tensor>& qkv, const SeenPositions& seen, double scale,
                           double dropout) {
  const at::Tensor& q = qkv[0];
  if (seen.window > 0 || seen.documents.defined()) {
    require(dropout == 0.0, kUlysses, ": dropout: expected 0 with documents or a window, found ", dropout);
    return RingAttention::apply(
        q, qkv[1], qkv[2], c10::make_intrusive<Ring>(PositionPieces::of_one_rank(q.size(2)), seen, scale, nullptr));
  }
  return at::scaled_dot_product_attention(q, qkv[1], qkv[2], {}, dropout, seen.causal, scale,
                                          q.size(1) != qkv[1].size(1));
}

}  // namespace

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                          const SequenceAttentionOptions& options) {
  require_inputs(kRing, q, k, v);
  PositionPieces pieces = PositionPieces::of_own(kRing, q.size(2), group, options.layout);
  SeenPositions seen = seen_of(kRing, options, q.size(0), pieces.positions());
  require(options.dropout == 0.0, kRing, ": dropout: expected 0, found ", options.dropout,
          ": no rank has the weights of all keys at once; use ulysses_attention");
  return RingAttention::apply(
      q, k, v, c10::make_intrusive<Ring>(std::move(pieces), std::move(seen), scale_of(options, q), &group));
}

at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                             const SequenceAttentionOptions& options) {
  require_inputs(kUlysses, q, k, v);
  const PositionPieces pieces = PositionPieces::of_own(kUlysses, q.size(2), group, options.layout);
  const SeenPositions seen = seen_of(kUlysses, options, q.size(0), pieces.positions());
  require(q.size(1) >= group.size(), kUlysses, ": expected a head of queries for each of the ", group.size(),
          " ranks of group ", group.name(), ", found ", q.size(1), "; use ring_attention");
  Ulysses ulysses{.group = group, .pieces = pieces, .heads = {}, .batch = q.size(0)};
  for (int rank = 0; rank < group.size(); ++rank) {
    ulysses.heads.push_back(heads_of(rank, group.size(), q.size(1), k.size(1)));
  }
  std::vector<at::Tensor> qkv = heads_of_whole(ulysses, q, k, v);
  for (size_t i : {size_t{1}, size_t{2}}) qkv[i] = for_own_queries(ulysses, qkv[i], q.size(1) / k.size(1));
  return positions_of_whole(ulysses, attend_to_whole(qkv, seen, scale_of(options, q), options.dropout));
}

at::Tensor sequence_positions(int64_t positions, const comm::Communicator& group, const SequenceLayout& layout) {
  const PositionPieces pieces = PositionPieces::of_whole("sequence_positions", positions, group, layout);
  std::vector<at::Tensor> own;
  for (const PositionPiece& piece : pieces.of_rank(group.rank())) {
    own.push_back(at::arange(piece.first, piece.first + piece.count, at::kLong));
  }
  return at::cat(own);
}

at::Tensor shard_sequence(const at::Tensor& whole, const comm::Communicator& group, int64_t dim,
                          const SequenceLayout& layout) {
  constexpr const char* kCall = "shard_sequence";
  require(whole.defined() && dim >= -whole.dim() && dim < whole.dim() && !is_split(whole), kCall,
          ": expected a full tensor with dimension ", dim, ", found ", ds::describe(whole));
  const PositionPieces pieces = PositionPieces::of_whole(kCall, whole.size(dim), group, layout);
  std::vector<at::Tensor> own;
  for (const PositionPiece& piece : pieces.of_rank(group.rank()))
    own.push_back(whole.narrow(dim, piece.first, piece.count));
  return at::cat(own, dim);
}

at::Tensor join_sequence(const at::Tensor& part, comm::Communicator& group, int64_t dim, const SequenceLayout& layout) {
  constexpr const char* kCall = "join_sequence";
  require(part.defined() && dim >= -part.dim() && dim < part.dim() && !is_split(part), kCall,
          ": expected a full tensor with dimension ", dim, ", found ", ds::describe(part));
  const int64_t along = dim < 0 ? dim + part.dim() : dim;
  const PositionPieces pieces = PositionPieces::of_own(kCall, part.size(along), group, layout);
  int64_t longest = 0;
  for (int rank = 0; rank < group.size(); ++rank) longest = std::max(longest, pieces.rows(rank));
  std::vector<int64_t> padding(static_cast<size_t>(2 * (part.dim() - along)), 0);
  padding.back() = longest - part.size(along);
  const at::Tensor padded = padding.back() == 0 ? part : at::constant_pad_nd(part, padding);
  const at::Tensor all = all_gather(padded, group, along);
  std::vector<at::Tensor> rows;
  for (int rank = 0; rank < group.size(); ++rank) rows.push_back(all.narrow(along, rank * longest, pieces.rows(rank)));
  return reordered(at::cat(rows, along), pieces, group.size(), along, /*to_ranks=*/false);
}

}  // namespace ds::parallel
