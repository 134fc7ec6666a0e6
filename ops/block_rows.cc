#include "ops/block_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace ds::ops {
namespace {

at::Tensor tensor_of(const std::vector<int64_t>& values) {
  at::Tensor result = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

// 1, 2, 3, 4, 6, 8, 12, ...
int64_t rounded_up(int64_t count) {
  int64_t power = 1;
  while (power < count) power *= 2;
  return power > 2 && power / 4 * 3 >= count ? power / 4 * 3 : power;
}

}  // namespace

BlockRows block_rows(const BlockLayout& layout, bool causal) {
  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> columns;
  for (int64_t head = 0; head < layout.heads; ++head) {
    for (int64_t row = 0; row < layout.blocks; ++row) {
      const int64_t end = causal ? row + 1 : layout.blocks;
      for (int64_t column = 0; column < end; ++column) {
        if (layout.has(head, row, column)) columns.push_back(column);
      }
      offsets.push_back(static_cast<int64_t>(columns.size()));
    }
  }
  return {tensor_of(offsets), tensor_of(columns)};
}

std::vector<RowGroup> row_groups(const BlockLayout& layout, int64_t heads, bool causal) {
  const BlockRows rows = block_rows(layout, causal);
  const auto* const offsets = rows.offsets.const_data_ptr<int64_t>();
  const auto* const columns = rows.columns.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> by_width;  // head * blocks + row
  for (int64_t row = 0; row < heads * layout.blocks; ++row) {
    const int64_t own = row % (layout.heads * layout.blocks);
    const int64_t count = offsets[own + 1] - offsets[own];
    if (count > 0) by_width[std::min(rounded_up(count), layout.blocks)].push_back(row);
  }
  std::vector<RowGroup> groups;
  for (const auto& [width, members] : by_width) {
    RowGroup group{tensor_of(members), at::full({static_cast<int64_t>(members.size()), width}, -1, at::kLong)};
    auto* to = group.columns.mutable_data_ptr<int64_t>();
    for (const int64_t row : members) {
      const int64_t own = row % (layout.heads * layout.blocks);
      std::copy(columns + offsets[own], columns + offsets[own + 1], to);
      to += width;
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace ds::ops
