#include "zero/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace ds::zero {
namespace {

// The count of a rank that refuses.
constexpr int64_t kRefused = -1;

}  // namespace

void RowExchange::start(comm::Communicator& ranks, const at::Tensor& rows, int64_t per_rank, std::string label) {
  ranks_ = &ranks;
  rows_ = rows.contiguous();
  per_rank_ = per_rank;
  label_ = std::move(label);
  const at::Tensor numbers = rows_.to(at::kCPU);
  const auto* from = numbers.const_data_ptr<int64_t>();
  const auto* const last = from + numbers.numel();
  named_.clear();
  for (int64_t owner = 0; owner < ranks.size(); ++owner) {
    const auto* const to = std::lower_bound(from, last, (owner + 1) * per_rank);
    named_.push_back(to - from);
    from = to;
  }
  ensure(from == last, "rows that are exchanged lie in the slice of some rank");
  named_counts_ = at::tensor(named_, at::kLong).to(rows_.device());
  asked_counts_ = at::empty_like(named_counts_);
  counts_ = ranks.all_to_all(asked_counts_, named_counts_, {}, {}, label_);
}

void RowExchange::refuse(comm::Communicator& ranks, const at::TensorOptions& options, const std::string& label) {
  const at::Tensor counts = at::full({ranks.size()}, kRefused, options);
  const at::Tensor unused = at::empty_like(counts);
  ranks.all_to_all(unused, counts, {}, {}, label).wait();
}

at::Tensor RowExchange::finish() {
  ensure(ranks_ != nullptr, "rows are sent after their number is told");
  std::exchange(counts_, comm::Work()).wait();
  const at::Tensor counts = asked_counts_.to(at::kCPU);
  asked_.assign(counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + counts.numel());
  const auto refused = std::find(asked_.begin(), asked_.end(), kRefused);
  require(refused == asked_.end(), label_, ": expected rows of the table from all ranks, found that rank ",
          refused - asked_.begin(), " has asked for one that the table does not have, which its own error names");
  return exchanged(rows_, named_, asked_).sub_(ranks_->rank() * per_rank_);
}

at::Tensor RowExchange::to_owners(const at::Tensor& values) const { return exchanged(values, named_, asked_); }

at::Tensor RowExchange::from_owners(const at::Tensor& values) const { return exchanged(values, asked_, named_); }

// `to`, `from`: by rank, the rows that this one sends and receives.
at::Tensor RowExchange::exchanged(const at::Tensor& values, const std::vector<int64_t>& to,
                                  const std::vector<int64_t>& from) const {
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = std::accumulate(from.begin(), from.end(), int64_t{0});
  const at::Tensor received = at::empty(sizes, values.options());
  ranks_->all_to_all(received, values.contiguous(), from, to, label_).wait();
  return received;
}

}  // namespace ds::zero
