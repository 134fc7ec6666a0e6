// Arithmetic of a tensor that is cut over ranks along one dimension: which elements a rank has, and what becomes of the
// cut when the tensor is reshaped or narrowed. Torch-free, pure.
//
// A dimension consists of blocks, and each block is cut in as many parts as there are ranks: the fused weight of query,
// key and value is three blocks, so that each rank has rows of all three (Megatron-LM, arXiv:1909.08053). A rank's part
// is what it has of each block, in the order of the blocks. Parts may be uneven: the first ranks have one grain more.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ds {

enum class PartOrder : uint8_t {
  kInOrder,  // a block is cut in T chunks, rank r has chunk r
  kZigzag,   // in 2T chunks, rank r has chunks r and 2T-1-r: equal work under a causal mask
};

struct Cut {
  int64_t dim = 0;
  std::vector<int64_t> blocks;  // sizes of the blocks, in elements of the dimension; empty: equal ones
  int64_t repeats = 1;          // how often `blocks` follow one another; with empty blocks: how many there are
  int64_t grain = 1;            // chunks are multiples of it (the size of a head); divides every block
  PartOrder order = PartOrder::kInOrder;

  bool operator==(const Cut&) const = default;
};

// Elements begin to begin + length of a dimension.
struct DimRange {
  int64_t begin = 0;
  int64_t length = 0;

  bool operator==(const DimRange&) const = default;
};

// Says in words why no dimension of `extent` elements can be cut so; empty: the cut is possible.
std::string cut_problem(const Cut& cut, int64_t extent);
// The sizes of the blocks that are repeated; one of extent / repeats where the cut has none.
std::vector<int64_t> blocks_of(const Cut& cut, int64_t extent);
// Chunk `index` of `count` of a block, from the block's begin.
DimRange chunk_of(int64_t block, int64_t grain, int index, int count);
// The ranges that rank `index` of `count` has of one block, from the block's begin, in the order in which the part has
// them.
std::vector<DimRange> ranges_in_block(const Cut& cut, int64_t block, int index, int count);
// The number of elements along the dimension that rank `index` has.
int64_t part_extent(const Cut& cut, int64_t extent, int index, int count);
// Whether all ranks have equally many of each block.
bool is_even(const Cut& cut, int64_t extent, int count);
// The cut in its one normal form: equal blocks without a list, grain 1 where all parts are even.
Cut normalized(Cut cut, int64_t extent, int count);

// The cut of a tensor of sizes `from` after a reshape to `to`, when each rank can reshape its part alone and has the
// same elements in the same order; nothing where it cannot. All sizes are positive and have one product.
std::optional<Cut> reshaped(const Cut& cut, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
                            int count);

// Elements [begin, end) of the cut dimension, when these are whole blocks: their cut, and where they are in the part.
struct NarrowedCut {
  Cut cut;
  DimRange part;
};
std::optional<NarrowedCut> narrowed(const Cut& cut, int64_t extent, DimRange range, int index, int count);

// One rank's part of a tensor.
class TensorPart {
 public:
  // Throws UsageError when the cut fits no tensor of these sizes, or index is none of 0 to count - 1.
  TensorPart(std::vector<int64_t> sizes, Cut cut, int index, int count);

  const std::vector<int64_t>& whole_sizes() const { return sizes_; }
  const Cut& cut() const { return cut_; }
  int index() const { return index_; }
  int count() const { return count_; }
  std::vector<int64_t> sizes() const;
  int64_t numel() const;
  // Ranges of the cut dimension that the part has, in its order.
  std::vector<DimRange> ranges() const;
  // Runs of elements [begin, end) of the part, row-major, which lie together in the full tensor too: the place in that,
  // the place in the part, the length.
  using Run = std::function<void(int64_t whole, int64_t part, int64_t length)>;
  void for_each_run(int64_t begin, int64_t end, const Run& run) const;

 private:
  std::vector<int64_t> sizes_;
  Cut cut_;
  int index_;
  int count_;
};

}  // namespace ds
