// Cuts at random, for properties that hold for every one of them.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "core/split/tensor_part.h"

namespace ds::test {

struct RandomCut {
  std::vector<int64_t> sizes;
  Cut cut;
  int count;
};

// Of 1 to 3 small dimensions: equal or unequal blocks, grains, both orders, uneven and empty parts, seldom no element.
inline RandomCut random_cut(std::mt19937& random) {
  const auto from = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  RandomCut result;
  const int64_t dims = from(1, 3);
  for (int64_t i = 0; i < dims; ++i) result.sizes.push_back(from(0, 12) == 0 ? 0 : from(1, 5));
  result.count = static_cast<int>(from(1, 5));
  Cut& cut = result.cut;
  cut.dim = from(0, dims - 1);
  cut.repeats = from(1, 3);
  cut.grain = from(1, 3);
  cut.order = from(0, 2) == 0 ? PartOrder::kZigzag : PartOrder::kInOrder;
  int64_t extent = 0;
  if (from(0, 1) == 0) {
    extent = from(0, 6) * cut.grain;
  } else {
    for (int64_t blocks = from(1, 3); blocks > 0; --blocks) cut.blocks.push_back(from(0, 5) * cut.grain);
    extent = std::accumulate(cut.blocks.begin(), cut.blocks.end(), int64_t{0});
  }
  result.sizes[cut.dim] = extent * cut.repeats;
  return result;
}

// Another cut of a tensor of these sizes.
inline RandomCut random_cut_of(std::vector<int64_t> sizes, std::mt19937& random) {
  const auto from = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  RandomCut result{.sizes = std::move(sizes), .cut = {}, .count = static_cast<int>(from(1, 5))};
  result.cut.dim = from(0, static_cast<int64_t>(result.sizes.size()) - 1);
  const int64_t extent = result.sizes[result.cut.dim];
  if (from(0, 1) == 0) {
    const int64_t first = from(0, extent);
    result.cut.blocks = {first, extent - first};
  } else if (extent % 2 == 0) {
    result.cut.repeats = 2;
  }
  if (from(0, 2) == 0) result.cut.order = PartOrder::kZigzag;
  return result;
}

}  // namespace ds::test
