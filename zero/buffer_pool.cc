#include "zero/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/memory/storage_memory.h"

namespace ds::zero {
namespace {

// A pass without reduction holds every bucket; buckets that are reduced in order never need more than these.
constexpr size_t kMostFree = 3;

}  // namespace

at::Tensor BufferPool::make(int64_t numel, const at::TensorOptions& options) {
  if (options.device().is_cpu()) return at::empty({numel}, options);
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  at::Tensor buffer = at::empty({0}, options);
  give_storage(buffer, memory_.take(bytes, buffer.device()), bytes);
  return buffer.as_strided({numel}, {1}, 0);
}

at::Tensor BufferPool::take(int64_t numel, const at::TensorOptions& options) {
  const auto fits =
      std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& free) { return free.numel() >= numel; });
  if (fits != free_.end()) {
    at::Tensor buffer = fits->narrow(0, 0, numel);
    free_.erase(fits);
    return buffer;
  }
  if (!free_.empty()) {  // too small for this bucket: replaced rather than kept beside
    count(-static_cast<int64_t>(free_.back().nbytes()));
    free_.pop_back();
  }
  at::Tensor buffer = make(numel, options);
  count(static_cast<int64_t>(buffer.nbytes()));
  return buffer;
}

void BufferPool::give_back(const at::Tensor& buffer) {
  // Whole storages are kept: a narrowed view is widened again.
  const auto whole = static_cast<int64_t>(buffer.storage().nbytes() / buffer.element_size());
  free_.push_back(buffer.as_strided({whole}, {1}, 0));
  std::sort(free_.begin(), free_.end(), [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); });
  for (; free_.size() > kMostFree; free_.erase(free_.begin())) count(-static_cast<int64_t>(free_.front().nbytes()));
}

void BufferPool::count(int64_t bytes) {
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
}

void BufferPool::clear() {
  free_.clear();
  bytes_ = 0;
  memory_.trim();
}

}  // namespace ds::zero
