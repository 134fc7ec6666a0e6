// Which positions of a cut sequence each rank has, and which of them see one another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/split/tensor_part.h"
#include "dsengine/sequence_attention.h"

namespace ds::parallel {

// Neighbouring positions that lie behind one another on their rank.
struct PositionPiece {
  int64_t first;  // position in the whole sequence
  int64_t row;    // place of the first one among the rank's own positions
  int64_t count;
};

// The positions of every rank of a sequence.
class PositionPieces {
 public:
  // `own`: positions of the calling rank, for `call` in messages. Throws UsageError where they do not fit the layout.
  static PositionPieces of_own(const char* call, int64_t own, const comm::Communicator& group,
                               const SequenceLayout& layout);
  static PositionPieces of_whole(const char* call, int64_t positions, const comm::Communicator& group,
                                 const SequenceLayout& layout);
  // A sequence that one rank has.
  static PositionPieces of_one_rank(int64_t positions);
  // A sequence that is a dimension of a split tensor, under its cut.
  static PositionPieces of_cut(int64_t positions, const Cut& cut, int ranks);

  int64_t positions() const { return positions_; }
  int ranks() const { return static_cast<int>(ranks_.size()); }
  int64_t rows(int rank) const;
  const std::vector<PositionPiece>& of_rank(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

 private:
  PositionPieces(const std::vector<int64_t>& lengths, SequenceOrder order);
  explicit PositionPieces(int64_t positions) : positions_(positions) {}
  void add_rank(const std::vector<DimRange>& ranges);

  int64_t positions_ = 0;
  std::vector<std::vector<PositionPiece>> ranks_;
};

// Which positions a query sees.
struct SeenPositions {
  bool causal = false;
  int64_t window = 0;    // 0: no limit
  at::Tensor documents;  // int64 [batch or 1, positions], or undefined
};

// A rectangle of scores: rows of queries by rows of keys.
struct ScoreBlock {
  int64_t query_row, query_rows;
  int64_t key_row, key_rows;
  bool causal = false;   // a query sees the keys up to its own row of the block, which is a square
  at::Tensor seen = {};  // bool [batch or 1, 1, query_rows, key_rows] where not all see all; else undefined
};

// The blocks in which queries of `queries` see keys of `keys`; each pair that sees the other is in one block.
std::vector<ScoreBlock> seen_blocks(const std::vector<PositionPiece>& queries, const std::vector<PositionPiece>& keys,
                                    const SeenPositions& seen);

// For each rank, whether its queries may see keys of each other rank: no pair of positions that see one another is left
// out. Which keys travel follows from it, so that it is the same on all ranks.
std::vector<std::vector<bool>> seen_ranks(const PositionPieces& pieces, const SeenPositions& seen);

}  // namespace ds::parallel
