#include "zero/gather_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>

namespace ds::zero {
namespace {

struct Pages {
  void* address;
  size_t bytes;
};

void unmap(void* context) {
  const std::unique_ptr<Pages> pages(static_cast<Pages*>(context));
  munmap(pages->address, pages->bytes);
}

c10::DataPtr map_pages(size_t bytes) {
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  return {address, new Pages{address, bytes}, &unmap, c10::Device(c10::kCPU)};
}

}  // namespace

c10::DataPtr GatherMemory::take(size_t bytes, c10::Device device) {
  most_taken_bytes_ = std::max(most_taken_bytes_, taken_bytes_ + bytes);
  const auto fits = std::find_if(free_.rbegin(), free_.rend(), [&](const auto& block) { return block.first == bytes; });
  c10::DataPtr block;
  if (fits != free_.rend()) {
    block = std::move(fits->second);
    free_.erase(std::next(fits).base());
    free_bytes_ -= bytes;
  } else {
    while (!free_.empty() && free_bytes_ + taken_bytes_ + bytes > most_taken_bytes_) {
      free_bytes_ -= free_.front().first;
      free_.erase(free_.begin());
    }
    block = device.is_cpu() ? map_pages(bytes) : of_device_.take(bytes, device);
  }
  taken_bytes_ += bytes;
  return block;
}

void GatherMemory::give_back(c10::DataPtr block, size_t bytes) {
  taken_bytes_ -= bytes;
  if (!block.device().is_cpu()) return;
  free_bytes_ += bytes;
  free_.emplace_back(bytes, std::move(block));
}

void GatherMemory::lend_to_kernel() {
  // Keeps as much as was needed at most since the last time.
  while (!free_.empty() && free_bytes_ + taken_bytes_ > most_taken_bytes_) {
    free_bytes_ -= free_.front().first;
    free_.erase(free_.begin());
  }
  most_taken_bytes_ = taken_bytes_;
  for (auto& [bytes, block] : free_) madvise(block.get(), bytes, MADV_FREE);
}

void GatherMemory::clear() {
  free_.clear();
  free_bytes_ = 0;
  most_taken_bytes_ = taken_bytes_;
  of_device_.trim();
}

}  // namespace ds::zero
