#include "parallel/sequence/position_pieces.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/check.h"
#include "core/split/tensor_part.h"

namespace ds::parallel {
namespace {

// Rows of queries that share a mask: few enough that a mask takes little memory, and that a window leaves most keys
// out.
constexpr int64_t kMaskedRows = 512;

int64_t pieces_of(SequenceOrder order, const comm::Communicator& group) {
  return order == SequenceOrder::kZigzag ? 2 * group.size() : group.size();
}

void require_lengths(const char* call, const comm::Communicator& group, const SequenceLayout& layout) {
  require(layout.order == SequenceOrder::kContiguous, call, ": layout.lengths: expected none with ",
          "SequenceOrder::kZigzag, whose pieces are equal, found ", layout.lengths.size());
  const bool fit = static_cast<int>(layout.lengths.size()) == group.size() &&
                   std::all_of(layout.lengths.begin(), layout.lengths.end(), [](int64_t length) { return length > 0; });
  require(fit, call, ": layout.lengths: expected 1 or more positions for each of the ", group.size(),
          " ranks of group ", group.name(), ", found ", c10::IntArrayRef(layout.lengths));
}

// Whether a pair of pieces has pairs of positions that see one another, and pairs that do not.
enum class Sight : uint8_t { kNone, kAll, kCausalSquare, kSome };

Sight sight_of(const PositionPiece& query, const PositionPiece& key, const SeenPositions& seen) {
  const int64_t last_query = query.first + query.count - 1;
  const int64_t last_key = key.first + key.count - 1;
  const int64_t least_back = query.first - last_key;  // how far the nearest key lies behind, and the farthest
  const int64_t most_back = last_query - key.first;
  if (seen.causal && most_back < 0) return Sight::kNone;
  if (seen.window > 0 && (least_back >= seen.window || -most_back >= seen.window)) return Sight::kNone;
  if (seen.documents.defined()) return Sight::kSome;
  const bool within = seen.window == 0 || (most_back < seen.window && (seen.causal || -least_back < seen.window));
  if (within && (!seen.causal || least_back >= 0)) return Sight::kAll;
  const bool is_square = query.first == key.first && query.count == key.count;
  return within && seen.causal && is_square ? Sight::kCausalSquare : Sight::kSome;
}

at::Tensor mask_of(const PositionPiece& query, const PositionPiece& key, const SeenPositions& seen) {
  const at::Tensor back = at::arange(query.first, query.first + query.count, at::kLong).unsqueeze(1) -
                          at::arange(key.first, key.first + key.count, at::kLong).unsqueeze(0);
  at::Tensor mask = seen.causal ? back.ge(0) : at::ones_like(back, at::kBool);
  if (seen.window > 0) mask = mask.logical_and(back.abs().lt(seen.window));
  mask = mask.unsqueeze(0).unsqueeze(0);
  if (!seen.documents.defined()) return mask;
  const at::Tensor same = seen.documents.narrow(1, query.first, query.count)
                              .unsqueeze(2)
                              .eq(seen.documents.narrow(1, key.first, key.count).unsqueeze(1));
  return mask.logical_and(same.unsqueeze(1));
}

// The masked blocks of a few rows of queries, with keys that no query sees left out at both ends.
std::optional<ScoreBlock> masked_block(const PositionPiece& query, const PositionPiece& key,
                                       const SeenPositions& seen) {
  const at::Tensor mask = mask_of(query, key, seen);
  const at::Tensor columns = mask.flatten(0, 2).any(0).nonzero();
  if (columns.size(0) == 0) return std::nullopt;
  const auto first = columns[0].item<int64_t>();
  const int64_t count = columns[-1].item<int64_t>() - first + 1;
  const at::Tensor kept = mask.narrow(3, first, count);
  ScoreBlock block{.query_row = query.row, .query_rows = query.count, .key_row = key.row + first, .key_rows = count};
  if (!kept.all().item<bool>()) block.seen = kept;
  return block;
}

void add_masked_blocks(const PositionPiece& query, const PositionPiece& key, const SeenPositions& seen,
                       std::vector<ScoreBlock>& blocks) {
  for (int64_t begin = 0; begin < query.count; begin += kMaskedRows) {
    const PositionPiece rows{
        .first = query.first + begin, .row = query.row + begin, .count = std::min(kMaskedRows, query.count - begin)};
    if (sight_of(rows, key, seen) == Sight::kNone) continue;
    if (auto block = masked_block(rows, key, seen)) blocks.push_back(*std::move(block));
  }
}

bool is_plain(const ScoreBlock& block) { return !block.causal && !block.seen.defined(); }

// Joins a block with the one before it where both are plain and side by side.
void add_plain_block(const ScoreBlock& block, std::vector<ScoreBlock>& blocks) {
  if (!blocks.empty() && is_plain(blocks.back())) {
    ScoreBlock& last = blocks.back();
    if (last.query_row == block.query_row && last.query_rows == block.query_rows &&
        last.key_row + last.key_rows == block.key_row) {
      last.key_rows += block.key_rows;
      return;
    }
    if (last.key_row == block.key_row && last.key_rows == block.key_rows &&
        last.query_row + last.query_rows == block.query_row) {
      last.query_rows += block.query_rows;
      return;
    }
  }
  blocks.push_back(block);
}

}  // namespace

PositionPieces::PositionPieces(const std::vector<int64_t>& lengths, SequenceOrder order)
    : positions_(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) {
  const auto ranks = static_cast<int>(lengths.size());
  int64_t first = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t length = lengths[static_cast<size_t>(rank)];
    std::vector<DimRange> ranges = {{.begin = first, .length = length}};
    if (order == SequenceOrder::kZigzag) {
      ranges = ranges_in_block({.blocks = {}, .order = PartOrder::kZigzag}, positions_, rank, ranks);
    }
    int64_t row = 0;
    std::vector<PositionPiece>& own = ranks_.emplace_back();
    for (const DimRange& range : ranges) {
      own.push_back({.first = range.begin, .row = row, .count = range.length});
      row += range.length;
    }
    first += length;
  }
}

PositionPieces PositionPieces::of_own(const char* call, int64_t own, const comm::Communicator& group,
                                      const SequenceLayout& layout) {
  if (layout.lengths.empty()) {
    require(layout.order == SequenceOrder::kContiguous || own % 2 == 0, call, ": expected an even number of positions ",
            "on a rank with SequenceOrder::kZigzag, found ", own);
    return {std::vector<int64_t>(static_cast<size_t>(group.size()), own), layout.order};
  }
  require_lengths(call, group, layout);
  const int64_t wanted = layout.lengths[static_cast<size_t>(group.rank())];
  require(own == wanted, call, ": expected the ", wanted, " positions that layout.lengths gives to rank ", group.rank(),
          " of group ", group.name(), ", found ", own);
  return {layout.lengths, layout.order};
}

PositionPieces PositionPieces::of_whole(const char* call, int64_t positions, const comm::Communicator& group,
                                        const SequenceLayout& layout) {
  if (layout.lengths.empty()) {
    const int64_t pieces = pieces_of(layout.order, group);
    require(positions > 0 && positions % pieces == 0, call, ": expected positions that divide into ", pieces,
            " equal pieces, found ", positions, "; pad the sequence to ",
            (std::max<int64_t>(positions, 1) + pieces - 1) / pieces * pieces,
            layout.order == SequenceOrder::kContiguous ? " or give layout.lengths" : "");
    return {std::vector<int64_t>(static_cast<size_t>(group.size()), positions / group.size()), layout.order};
  }
  require_lengths(call, group, layout);
  PositionPieces pieces(layout.lengths, layout.order);
  require(pieces.positions() == positions, call, ": layout.lengths: expected numbers that add up to the ", positions,
          " positions, found ", c10::IntArrayRef(layout.lengths));
  return pieces;
}

PositionPieces PositionPieces::of_one_rank(int64_t positions) { return {{positions}, SequenceOrder::kContiguous}; }

int64_t PositionPieces::rows(int rank) const {
  const PositionPiece& last = of_rank(rank).back();
  return last.row + last.count;
}

std::vector<ScoreBlock> seen_blocks(const std::vector<PositionPiece>& queries, const std::vector<PositionPiece>& keys,
                                    const SeenPositions& seen) {
  std::vector<ScoreBlock> blocks;
  for (const PositionPiece& query : queries) {
    for (const PositionPiece& key : keys) {
      const Sight sight = sight_of(query, key, seen);
      if (sight == Sight::kNone) continue;
      if (sight == Sight::kSome) {
        add_masked_blocks(query, key, seen, blocks);
        continue;
      }
      ScoreBlock block{.query_row = query.row, .query_rows = query.count, .key_row = key.row, .key_rows = key.count};
      block.causal = sight == Sight::kCausalSquare;
      if (block.causal) {
        blocks.push_back(block);
      } else {
        add_plain_block(block, blocks);
      }
    }
  }
  return blocks;
}

}  // namespace ds::parallel
