// The public calls of sequence_attention.h, but for sequences of split tensors; and Ulysses.
#include "dsengine/sequence_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/split/tensor_part.h"
#include "core/tensor_check.h"
#include "dsengine/collectives.h"
#include "parallel/sequence/pieces_attention.h"

namespace ds::parallel {
namespace {

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
    return ring_over_pieces({.query = q, .key = qkv[1], .value = qkv[2], .scale = scale},
                            PositionPieces::of_one_rank(q.size(2)), seen, nullptr);
  }
  return at::scaled_dot_product_attention(q, qkv[1], qkv[2], {}, dropout, seen.causal, scale,
                                          q.size(1) != qkv[1].size(1));
}

}  // namespace

at::Tensor ulysses_over_pieces(const AttentionInputs& inputs, const PositionPieces& pieces, const SeenPositions& seen,
                               double dropout, comm::Communicator& group) {
  const auto& [q, k, v, scale] = inputs;
  Ulysses ulysses{.group = group, .pieces = pieces, .heads = {}, .batch = q.size(0)};
  for (int rank = 0; rank < group.size(); ++rank) {
    ulysses.heads.push_back(heads_of(rank, group.size(), q.size(1), k.size(1)));
  }
  std::vector<at::Tensor> qkv = heads_of_whole(ulysses, q, k, v);
  for (size_t i : {size_t{1}, size_t{2}}) qkv[i] = for_own_queries(ulysses, qkv[i], q.size(1) / k.size(1));
  return positions_of_whole(ulysses, attend_to_whole(qkv, seen, scale, dropout));
}

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                          const SequenceAttentionOptions& options) {
  require_inputs(kRing, q, k, v);
  PositionPieces pieces = PositionPieces::of_own(kRing, q.size(2), group, options.layout);
  SeenPositions seen = seen_of(kRing, options, q.size(0), pieces.positions());
  require(options.dropout == 0.0, kRing, ": dropout: expected 0, found ", options.dropout,
          ": no rank has the weights of all keys at once; use ulysses_attention");
  return ring_over_pieces({.query = q, .key = k, .value = v, .scale = scale_of(options, q)}, std::move(pieces),
                          std::move(seen), &group);
}

at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                             const SequenceAttentionOptions& options) {
  require_inputs(kUlysses, q, k, v);
  const PositionPieces pieces = PositionPieces::of_own(kUlysses, q.size(2), group, options.layout);
  const SeenPositions seen = seen_of(kUlysses, options, q.size(0), pieces.positions());
  require(q.size(1) >= group.size(), kUlysses, ": expected a head of queries for each of the ", group.size(),
          " ranks of group ", group.name(), ", found ", q.size(1), "; use ring_attention");
  return ulysses_over_pieces({.query = q, .key = k, .value = v, .scale = scale_of(options, q)}, pieces, seen,
                             options.dropout, group);
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
