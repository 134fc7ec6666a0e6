#include "ops/block_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

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

RowGroups row_groups(const BlockLayout& layout, const BlockRows& rows, int64_t heads, at::Device device) {
  const auto* const offsets = rows.offsets.const_data_ptr<int64_t>();
  const auto* const columns = rows.columns.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> by_width;  // head * blocks + row
  for (int64_t row = 0; row < heads * layout.blocks; ++row) {
    const int64_t own = row % (layout.heads * layout.blocks);
    const int64_t count = offsets[own + 1] - offsets[own];
    if (count > 0) by_width[std::min(rounded_up(count), layout.blocks)].push_back(row);
  }
  RowGroups result;
  std::vector<int64_t> places(static_cast<size_t>(heads * layout.blocks), -1);
  int64_t place = 0;
  for (const auto& [width, members] : by_width) {
    const at::Tensor own_columns = at::full({static_cast<int64_t>(members.size()), width}, -1, at::kLong);
    const at::Tensor gathered = at::empty_like(own_columns);
    auto* to = own_columns.mutable_data_ptr<int64_t>();
    auto* from = gathered.mutable_data_ptr<int64_t>();
    for (const int64_t row : members) {
      const int64_t own = row % (layout.heads * layout.blocks);
      std::copy(columns + offsets[own], columns + offsets[own + 1], to);
      const int64_t first = row / layout.blocks * layout.blocks;
      std::transform(to, to + width, from, [&](int64_t column) { return first + std::max<int64_t>(column, 0); });
      to += width;
      from += width;
      places[static_cast<size_t>(row)] = place++;
    }
    result.groups.push_back({tensor_of(members).to(device), own_columns.to(device), gathered.view({-1}).to(device)});
  }
  std::replace(places.begin(), places.end(), int64_t{-1}, place);
  result.places = tensor_of(places).to(device);
  return result;
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

const BlockRows& LayoutRows::rows_locked(bool causal) const {
  std::optional<BlockRows>& rows = rows_[causal ? 1 : 0];
  const c10::InferenceMode plain(false);  // what is made under it no later backward could use
  if (!rows) rows = block_rows(*layout_, causal);
  return *rows;
}

const BlockRows& LayoutRows::rows(bool causal) const {
  const std::lock_guard lock(mutex_);
  return rows_locked(causal);
}

const RowGroups& LayoutRows::groups(int64_t heads, bool causal, at::Device device) const {
  const std::lock_guard lock(mutex_);
  const std::tuple key(heads, causal, device.type(), device.index());
  const auto found = groups_.find(key);
  if (found != groups_.end()) return found->second;
  const c10::InferenceMode plain(false);
  return groups_.emplace(key, row_groups(*layout_, rows_locked(causal), heads, device)).first->second;
}

}  // namespace ds::ops
