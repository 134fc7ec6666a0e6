#include "parallel/sequence/position_pieces.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unique_consecutive.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "core/check.h"

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
  const int64_t first = columns[0].item<int64_t>();
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

// The documents of a piece, for each entry of the batch.
using PieceDocuments = std::vector<std::set<int64_t>>;

PieceDocuments documents_of(const PositionPiece& piece, const at::Tensor& documents) {
  PieceDocuments result;
  for (int64_t row = 0; row < documents.size(0); ++row) {
    const at::Tensor own = documents.select(0, row).narrow(0, piece.first, piece.count).contiguous();
    const at::Tensor runs = std::get<0>(at::unique_consecutive(own));
    const auto* const first = runs.const_data_ptr<int64_t>();
    result.emplace_back(first, first + runs.numel());
  }
  return result;
}

bool have_common_document(const PieceDocuments& a, const PieceDocuments& b) {
  for (size_t row = 0; row < a.size(); ++row) {
    if (std::any_of(a[row].begin(), a[row].end(), [&](int64_t document) { return b[row].contains(document); })) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::vector<std::vector<bool>> seen_ranks(const PositionPieces& pieces, const SeenPositions& seen) {
  const auto ranks = static_cast<size_t>(pieces.ranks());
  std::vector<std::vector<PieceDocuments>> documents(ranks);
  for (size_t rank = 0; rank < ranks && seen.documents.defined(); ++rank) {
    for (const PositionPiece& piece : pieces.of_rank(static_cast<int>(rank))) {
      documents[rank].push_back(documents_of(piece, seen.documents));
    }
  }
  const auto sees = [&](size_t query_rank, size_t key_rank) {
    const std::vector<PositionPiece>& queries = pieces.of_rank(static_cast<int>(query_rank));
    const std::vector<PositionPiece>& keys = pieces.of_rank(static_cast<int>(key_rank));
    for (size_t i = 0; i < queries.size(); ++i) {
      for (size_t k = 0; k < keys.size(); ++k) {
        if (sight_of(queries[i], keys[k], seen) == Sight::kNone) continue;
        if (!seen.documents.defined() || have_common_document(documents[query_rank][i], documents[key_rank][k])) {
          return true;
        }
      }
    }
    return false;
  };
  std::vector<std::vector<bool>> result(ranks, std::vector<bool>(ranks));
  for (size_t query = 0; query < ranks; ++query) {
    for (size_t key = 0; key < ranks; ++key) result[query][key] = query == key || sees(query, key);
  }
  return result;
}

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
    add_rank(ranges);
    first += length;
  }
}

void PositionPieces::add_rank(const std::vector<DimRange>& ranges) {
  int64_t row = 0;
  std::vector<PositionPiece>& own = ranks_.emplace_back();
  for (const DimRange& range : ranges) {
    own.push_back({.first = range.begin, .row = row, .count = range.length});
    row += range.length;
  }
}

PositionPieces PositionPieces::of_cut(int64_t positions, const Cut& cut, int ranks) {
  PositionPieces result(positions);
  Cut along_first = cut;
  along_first.dim = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    result.add_rank(TensorPart({positions}, along_first, rank, ranks).ranges());
  }
  return result;
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
