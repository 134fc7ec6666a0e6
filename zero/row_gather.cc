#include "zero/row_gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/check.h"

namespace ds::zero {

void RowGather::start(comm::Communicator& ranks, TableRows own, std::string label) {
  ranks_ = &ranks;
  own_ = std::move(own);
  label_ = std::move(label);
  const at::TensorOptions options = own_.rows.options();
  own_count_ = at::full({1}, own_.rows.numel(), options);
  counts_ = at::empty({ranks.size()}, options);
  work_ = ranks.all_gather(counts_, own_count_, label_);
}

TableRows RowGather::finish() {
  ensure(ranks_ != nullptr, "rows are gathered after their number is told");
  comm::Communicator& ranks = *std::exchange(ranks_, nullptr);
  TableRows own = std::exchange(own_, TableRows());
  std::exchange(work_, comm::Work()).wait();
  const at::Tensor counts = counts_.to(at::kCPU);
  const auto most = counts.max().item<int64_t>();
  if (most == 0) return own;
  const int64_t size = ranks.size();
  const int64_t width = own.values.size(1);
  const at::Tensor rows = at::zeros({size * most}, own.rows.options());
  const at::Tensor values = at::zeros({size * most, width}, own.values.options());
  const int64_t begin = ranks.rank() * most;
  rows.narrow(0, begin, own.rows.numel()).copy_(own.rows);
  values.narrow(0, begin, own.rows.numel()).copy_(own.values);
  comm::Work sends_rows = ranks.all_gather(rows, rows.narrow(0, begin, most), label_);
  ranks.all_gather(values, values.narrow(0, begin, most), label_).wait();
  sends_rows.wait();
  std::vector<at::Tensor> of_ranks;
  std::vector<at::Tensor> values_of_ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto count = counts[rank].item<int64_t>();
    of_ranks.push_back(rows.narrow(0, rank * most, count));
    values_of_ranks.push_back(values.narrow(0, rank * most, count));
  }
  return {.rows = at::cat(of_ranks), .values = at::cat(values_of_ranks)};
}

}  // namespace ds::zero
