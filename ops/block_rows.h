// A layout of blocks by rows: for each row of blocks the columns that are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "dsengine/sparsity_pattern.h"

namespace ds::ops {

// int64 on the CPU.
struct BlockRows {
  at::Tensor offsets;  // [heads of the layout * blocks + 1]
  at::Tensor columns;  // ascending in each row
};

// `causal`: without what is above the diagonal.
BlockRows block_rows(const BlockLayout& layout, bool causal);

// Blocks of queries of any head with about as many blocks of keys, for operators that take dense tensors. int64 on one
// device.
struct RowGroup {
  at::Tensor rows;      // [rows of the group]: head * blocks + row, of all `heads`
  at::Tensor columns;   // [rows of the group, most columns of one]: blocks of keys; -1 where a row has fewer
  at::Tensor gathered;  // [all of these]: head * blocks + column; the first of the head where a row has fewer
};

// Groups differ in their number of columns by a third at least, so that little is computed in vain. Rows without
// columns are in none.
struct RowGroups {
  std::vector<RowGroup> groups;
  // [heads * blocks], on the device: of each row its place in the groups, one behind another; behind all where it is in
  // none.
  at::Tensor places;
};

// A layout, and what calls read of it, which the first that needs it makes. May be used by several threads at once.
class LayoutRows {
 public:
  explicit LayoutRows(std::shared_ptr<const BlockLayout> layout) : layout_(std::move(layout)) {}

  const std::shared_ptr<const BlockLayout>& layout() const { return layout_; }
  // Both stay as long as this does. `causal` as block_rows() has it; `heads` of the query.
  const BlockRows& rows(bool causal) const;
  const RowGroups& groups(int64_t heads, bool causal, at::Device device) const;

 private:
  const BlockRows& rows_locked(bool causal) const;

  std::shared_ptr<const BlockLayout> layout_;
  mutable std::mutex mutex_;
  mutable std::array<std::optional<BlockRows>, 2> rows_;  // by causal
  mutable std::map<std::tuple<int64_t, bool, c10::DeviceType, c10::DeviceIndex>, RowGroups> groups_;
};

}  // namespace ds::ops
