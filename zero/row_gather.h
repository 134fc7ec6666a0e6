// Exchanges of rows of a table, with their numbers, in place of the table.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/slices/table_rows.h"
#include "dsengine/comm.h"

namespace ds::zero {

// Gives every rank the rows of all ranks, which may have unlike numbers of them. Two exchanges: start() tells how many
// each has, finish() sends them, filled up to the most that one has. Collective: ranks make both calls in one order.
class RowGather {
 public:
  RowGather() = default;
  // Throws CommError, as finish() does. `ranks` outlives the exchange. `label`: what it is called.
  void start(comm::Communicator& ranks, TableRows own, std::string label);
  // Returns the rows of all ranks, rank by rank.
  TableRows finish();

 private:
  comm::Communicator* ranks_ = nullptr;
  TableRows own_;
  std::string label_;
  at::Tensor own_count_;  // [1]
  at::Tensor counts_;     // [ranks]
  comm::Work work_;
};

}  // namespace ds::zero
