#include "zero/gather/row_reads.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/record_function.h>

#include <exception>
#include <string>

#include "core/check.h"
#include "zero/gather/gather_errors.h"
#include "zero/row_exchange.h"

namespace ds::zero {
namespace {

// Returns why a table of `count` rows does not have all of `rows`; empty: it has.
std::string reason_against(const at::Tensor& rows, int64_t count) {
  if (rows.numel() == 0) return {};
  const at::Tensor ends = at::stack({rows[0], rows[-1]}).to(at::kCPU);
  const auto first = ends[0].item<int64_t>();
  const auto last = ends[1].item<int64_t>();
  if (first >= 0 && last < count) return {};
  return cat("expected indices in [0, ", count, "), found ", first < 0 ? first : last);
}

}  // namespace

at::Tensor RowReads::read(size_t bucket, const at::Tensor& rows) {
  constexpr uint64_t kMixing = 0x9E3779B97F4A7C15;
  const LiveBuckets::Entry& entry = buckets_[bucket];
  if (!entry.is_read_by_rows() || !entry.bucket->storage().is_here(/*position=*/0)) return {};
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  digest_ = (digest_ * kMixing + bucket + 1) * kMixing + static_cast<uint64_t>(buckets_.counts().started);
  const BucketLayout& layout = entry.bucket->layout();
  const Parameter& table = entry.bucket->parameters().front();
  const std::string label = cat("rows that are read of bucket ", entry.bucket->describe(bucket));
  try {
    const std::string reason = reason_against(rows, table.tensor.size(0));
    if (!reason.empty()) {
      RowExchange::refuse(ranks_, rows.options(), label);
      throw UsageError(cat("parameter ", table.name, ": rank ", ranks_.rank(), " reads rows of the table: ", reason));
    }
    RowExchange exchange;
    exchange.start(ranks_, rows, layout.slice_numel / layout.row_width, label);
    const at::Tensor asked = exchange.finish();
    const at::Tensor own = entry.bucket->kept_slice().tensor().view({-1, layout.row_width});
    return exchange.from_owners(own.index_select(0, asked));
  } catch (...) {
    std::rethrow_exception(add_advice(std::current_exception()));
  }
}

}  // namespace ds::zero
