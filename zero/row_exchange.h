// Exchanges of rows of a table that ranks have in slices: numbers of rows go to the ranks that own them, their values
// go there or come back. What is sent is in proportion to the rows that are named.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::zero {

// One exchange. Rank r owns the rows [r * per_rank, (r + 1) * per_rank). Collective: ranks make the calls in one order,
// and all of them throw CommError. Not thread safe. The caller turns autograd off.
class RowExchange {
 public:
  RowExchange() = default;
  // Tells each owner how many rows it is named. `rows`: [k] int64, ascending, each once. `ranks` outlives the exchange.
  // `label`: what the exchange is called.
  void start(comm::Communicator& ranks, const at::Tensor& rows, int64_t per_rank, std::string label);
  // Takes the place of start() and finish() on a rank that has no rows that could be named, and is about to say so:
  // finish() throws a UsageError on the other ranks. `options`: those of `rows`.
  static void refuse(comm::Communicator& ranks, const at::TensorOptions& options, const std::string& label);
  // Sends the numbers. Returns those that ranks have named to this one, rank by rank: [n], counted from the first row
  // that it owns.
  at::Tensor finish();
  // Sends values of `rows`, [k, width], to their owners. Returns those of finish()'s rows, [n, width].
  at::Tensor to_owners(const at::Tensor& values) const;
  // Sends values of finish()'s rows, [n, width], to the ranks that have named them. Returns those of `rows`, [k,
  // width].
  at::Tensor from_owners(const at::Tensor& values) const;

 private:
  at::Tensor exchanged(const at::Tensor& values, const std::vector<int64_t>& to,
                       const std::vector<int64_t>& from) const;

  comm::Communicator* ranks_ = nullptr;
  at::Tensor rows_;
  int64_t per_rank_ = 0;
  std::string label_;
  std::vector<int64_t> named_;  // by rank, the number of `rows` that it owns
  std::vector<int64_t> asked_;  // by rank, the number of rows that it has named to this one
  at::Tensor named_counts_;     // named_, on the device
  at::Tensor asked_counts_;     // asked_, on the device
  comm::Work counts_;           // their exchange
};

}  // namespace ds::zero
