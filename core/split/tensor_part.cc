#include "core/split/tensor_part.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace ds {
namespace {

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  int64_t result = 1;
  for (size_t i = begin; i < end; ++i) result *= sizes[i];
  return result;
}

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

int chunks_of(const Cut& cut, int count) { return cut.order == PartOrder::kZigzag ? 2 * count : count; }

int64_t extent_in_block(const Cut& cut, int64_t block, int index, int count) {
  if (cut.order == PartOrder::kInOrder) return chunk_of(block, cut.grain, index, count).length;
  return chunk_of(block, cut.grain, index, 2 * count).length +
         chunk_of(block, cut.grain, 2 * count - 1 - index, 2 * count).length;
}

// The ranges in the blocks of one repeat.
int64_t extent_in_blocks(const Cut& cut, const std::vector<int64_t>& blocks, int index, int count) {
  int64_t result = 0;
  for (const int64_t block : blocks) result += extent_in_block(cut, block, index, count);
  return result;
}

// The grain after elements of the dimension have become `from_inner` / `to_inner` times as many; 0: chunks would end
// within an element.
int64_t reshaped_grain(const Cut& cut, const std::vector<int64_t>& blocks, int64_t from_inner, int64_t to_inner,
                       int count) {
  const int chunks = chunks_of(cut, count);
  const auto is_whole = [&](int64_t elements) { return elements * from_inner % to_inner == 0; };
  if (!std::all_of(blocks.begin(), blocks.end(), is_whole)) return 0;
  if (is_whole(cut.grain)) return cut.grain * from_inner / to_inner;
  const auto is_even_block = [&](int64_t block) { return block / cut.grain % chunks == 0 && is_whole(block / chunks); };
  return std::all_of(blocks.begin(), blocks.end(), is_even_block) ? 1 : 0;
}

}  // namespace

std::string cut_problem(const Cut& cut, int64_t extent) {
  if (cut.repeats < 1 || cut.grain < 1) return "repeats and grain must be positive";
  if (cut.blocks.empty() && extent % cut.repeats != 0) {
    return cat("a dimension of ", extent, " elements has no ", cut.repeats, " equal blocks");
  }
  if (!cut.blocks.empty() && sum(cut.blocks) * cut.repeats != extent) {
    return cat("blocks have ", sum(cut.blocks) * cut.repeats, " elements together, the dimension has ", extent);
  }
  for (const int64_t block : blocks_of(cut, extent)) {
    if (block < 0) return "a block has a negative size";
    if (block % cut.grain != 0) return cat("a block of ", block, " is no multiple of the grain ", cut.grain);
  }
  return {};
}

std::vector<int64_t> blocks_of(const Cut& cut, int64_t extent) {
  return cut.blocks.empty() ? std::vector<int64_t>{extent / cut.repeats} : cut.blocks;
}

DimRange chunk_of(int64_t block, int64_t grain, int index, int count) {
  const int64_t units = block / grain;
  const int64_t least = units / count;
  const int64_t longer = units % count;  // the first chunks have one more
  return {.begin = (least * index + std::min<int64_t>(index, longer)) * grain,
          .length = (least + (index < longer ? 1 : 0)) * grain};
}

std::vector<DimRange> ranges_in_block(const Cut& cut, int64_t block, int index, int count) {
  if (cut.order == PartOrder::kInOrder) return {chunk_of(block, cut.grain, index, count)};
  return {chunk_of(block, cut.grain, index, 2 * count), chunk_of(block, cut.grain, 2 * count - 1 - index, 2 * count)};
}

int64_t part_extent(const Cut& cut, int64_t extent, int index, int count) {
  if (cut.blocks.empty()) return extent_in_block(cut, extent / cut.repeats, index, count) * cut.repeats;
  return extent_in_blocks(cut, cut.blocks, index, count) * cut.repeats;
}

bool is_even(const Cut& cut, int64_t extent, int count) {
  const int chunks = chunks_of(cut, count);
  const auto even = [&](int64_t block) { return block / cut.grain % chunks == 0; };
  if (cut.blocks.empty()) return even(extent / cut.repeats);
  return std::all_of(cut.blocks.begin(), cut.blocks.end(), even);
}

Cut normalized(Cut cut, int64_t extent, int count) {
  if (is_even(cut, extent, count)) cut.grain = 1;
  const auto differs = [&](int64_t block) { return block != cut.blocks.front(); };
  if (!cut.blocks.empty() && std::none_of(cut.blocks.begin(), cut.blocks.end(), differs)) {
    cut.repeats *= static_cast<int64_t>(cut.blocks.size());
    cut.blocks.clear();
  }
  return cut;
}

std::optional<Cut> reshaped(const Cut& cut, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
                            int count) {
  const int64_t extent = from[cut.dim];
  const int64_t from_inner = product(from, cut.dim + 1, from.size());
  const std::vector<int64_t> blocks = blocks_of(cut, extent);
  const int64_t period = sum(blocks) * from_inner;  // elements after which the pattern of parts begins again
  if (period == 0) return std::nullopt;
  int64_t inner = 1;
  for (int64_t dim = static_cast<int64_t>(to.size()) - 1; dim >= 0; inner *= to[dim], --dim) {
    const int64_t span = to[dim] * inner;
    if (span == 0) return std::nullopt;
    if (span % period != 0) continue;
    const int64_t grain = reshaped_grain(cut, blocks, from_inner, inner, count);
    if (grain == 0) continue;
    Cut result{.dim = dim, .blocks = {}, .repeats = span / period, .grain = grain, .order = cut.order};
    for (const int64_t block : blocks) result.blocks.push_back(block * from_inner / inner);
    return normalized(std::move(result), to[dim], count);
  }
  return std::nullopt;
}

std::optional<NarrowedCut> narrowed(const Cut& cut, int64_t extent, DimRange range, int index, int count) {
  const std::vector<int64_t> blocks = blocks_of(cut, extent);
  const int64_t end = range.begin + range.length;
  NarrowedCut result{.cut = cut, .part = {}};
  result.cut.blocks.clear();
  result.cut.repeats = 1;
  int64_t position = 0;
  bool begins = false;
  bool ends = false;
  for (int64_t repeat = 0; repeat < cut.repeats && !ends; ++repeat) {
    for (const int64_t block : blocks) {
      begins = begins || position == range.begin;
      if (position >= end) break;
      const int64_t part = extent_in_block(cut, block, index, count);
      if (begins) {
        result.cut.blocks.push_back(block);
        result.part.length += part;
      } else {
        result.part.begin += part;
      }
      position += block;
    }
    ends = position >= end;
  }
  if (!begins || position != end || result.cut.blocks.empty()) return std::nullopt;
  result.cut = normalized(std::move(result.cut), range.length, count);
  return result;
}

TensorPart::TensorPart(std::vector<int64_t> sizes, Cut cut, int index, int count)
    : sizes_(std::move(sizes)), cut_(std::move(cut)), index_(index), count_(count) {
  require(cut_.dim >= 0 && cut_.dim < static_cast<int64_t>(sizes_.size()), "a tensor of ", sizes_.size(),
          " dimensions has no dimension ", cut_.dim, " to be cut along");
  require(index >= 0 && index < count, "there is no part ", index, " of ", count);
  const std::string problem = cut_problem(cut_, sizes_[cut_.dim]);
  require(problem.empty(), "a cut along dimension ", cut_.dim, ": ", problem);
}

std::vector<int64_t> TensorPart::sizes() const {
  std::vector<int64_t> result = sizes_;
  result[cut_.dim] = part_extent(cut_, sizes_[cut_.dim], index_, count_);
  return result;
}

int64_t TensorPart::numel() const { return product(sizes(), 0, sizes_.size()); }

std::vector<DimRange> TensorPart::ranges() const {
  std::vector<DimRange> result;
  int64_t begin = 0;
  for (int64_t repeat = 0; repeat < cut_.repeats; ++repeat) {
    for (const int64_t block : blocks_of(cut_, sizes_[cut_.dim])) {
      for (const DimRange& range : ranges_in_block(cut_, block, index_, count_)) {
        if (range.length > 0) result.push_back({.begin = begin + range.begin, .length = range.length});
      }
      begin += block;
    }
  }
  return result;
}

void TensorPart::for_each_run(int64_t begin, int64_t end, const Run& run) const {
  const int64_t outer = product(sizes_, 0, cut_.dim);
  const int64_t inner = product(sizes_, cut_.dim + 1, sizes_.size());
  const std::vector<DimRange> ranges = this->ranges();
  int64_t part = 0;
  for (int64_t row = 0; row < outer; ++row) {
    for (const DimRange& range : ranges) {
      const int64_t whole = (row * sizes_[cut_.dim] + range.begin) * inner;
      const int64_t length = range.length * inner;
      const int64_t from = std::max(begin, part);
      const int64_t to = std::min(end, part + length);
      if (from < to) run(whole + from - part, from, to - from);
      part += length;
    }
  }
}

}  // namespace ds
