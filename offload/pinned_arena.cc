#include "offload/pinned_arena.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "comm/backends/cuda_plugin.h"
#include "core/check.h"
#include "core/log.h"
#include "core/making_process.h"
#include "core/memory/storage_memory.h"
#include "core/round_up.h"
#include "core/system_call.h"
#include "core/text.h"
#include "core/without_stack.h"
#include "offload/host_budget.h"

namespace ds::offload {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallestPart = size_t{256} << 20;  // worth a thread of its own
constexpr int kPopulateWrite = 23;                   // MADV_POPULATE_WRITE, Linux 5.14

size_t host_page_size() {
  static const auto kSize = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return kSize;
}

// "always [madvise] never": the choice in force is in brackets.
bool kernel_offers_huge_pages() {
  auto in = classic_stream<std::ifstream>("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return text.find("[always]") != std::string::npos || text.find("[madvise]") != std::string::npos;
}

void* map_pages(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

// Starts at a huge page; the ends that alignment costs are given back.
void* map_aligned(size_t bytes) {
  auto* const data = static_cast<std::byte*>(map_pages(bytes + kHugePage));
  if (data == nullptr) return nullptr;
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(data) % kHugePage) % kHugePage;
  if (before > 0) munmap(data, before);
  munmap(data + before + bytes, kHugePage - before);
  return data + before;
}

// Returns an errno, 0 when every page is there.
int touch_part(std::byte* data, size_t bytes) {
  while (madvise(data, bytes, kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL && errno != ENOSYS) return errno;
    volatile auto* const first = data;  // an older kernel
    for (size_t offset = 0; offset < bytes; offset += host_page_size()) first[offset] = std::byte{0};
    return 0;
  }
  return 0;
}

// The kernel zeroes pages for as many threads as LibTorch has: one alone needs the better part of a minute for 100 GB.
int touch_pages(std::byte* data, size_t bytes) {
  const auto threads = static_cast<size_t>(std::max(1, at::get_num_threads()));
  const size_t part = std::max(kSmallestPart, (bytes / threads + kHugePage) / kHugePage * kHugePage);
  std::atomic<int> error = 0;
  std::vector<std::jthread> others;
  const auto touch = [&](size_t begin) {
    const int failed = touch_part(data + begin, std::min(part, bytes - begin));
    if (failed != 0) error = failed;
  };
  for (size_t begin = part; begin < bytes; begin += part) others.emplace_back(touch, begin);
  touch(0);
  others.clear();
  return error;
}

std::string limit_of_locked_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return size_text(static_cast<int64_t>(limit.rlim_cur));
}

// Empty, or why it could not be done. The memory is registered from the device whose copies come and go: from another
// one this rank would open a context there.
std::string register_with_cuda(void* data, size_t bytes, at::Device device) {
  try {
    const comm::CudaPlugin& plugin = comm::cuda_plugin();
    const c10::DeviceGuard guard(device);
    return plugin.register_host_memory(data, bytes);
  } catch (const std::exception& error) {
    return without_stack(error.what());
  }
}

// All bytes of a tensor's storage.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto length = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), /*storage_offset=*/0, {length}, {1});
}

}  // namespace

class PinnedArena::Region {
 public:
  Region(const std::string& purpose, size_t bytes, const ArenaOptions& options);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool pinned() const { return pinned_; }
  bool huge_pages() const { return huge_pages_; }

 private:
  void map(const std::string& purpose);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool huge_pages_ = false;
  bool pinned_ = false;
  MakingProcess process_;
};

PinnedArena::Region::Region(const std::string& purpose, size_t bytes, const ArenaOptions& options)
    : size_(static_cast<size_t>(round_up(static_cast<int64_t>(bytes), static_cast<int64_t>(host_page_size())))) {
  if (size_ == 0) return;
  const bool pin = options.pin && options.device.is_cuda();
  huge_pages_ = options.huge_pages && size_ >= kHugePage && kernel_offers_huge_pages();
  require_host_memory(static_cast<int64_t>(size_), purpose);
  log::info("host memory: ", size_text(static_cast<int64_t>(size_)), " for ", purpose, pin ? ", pinned" : "",
            huge_pages_ ? ", huge pages" : "");
  map(purpose);
  if (!pin) return;
  const std::string reason = register_with_cuda(data_, size_, options.device);
  pinned_ = reason.empty();
  if (pinned_) return;
  log::warning("host memory: ", size_text(static_cast<int64_t>(size_)), " for ", purpose, " could not be pinned (",
               reason, "; locked memory: ", limit_of_locked_memory(), "). It stays pageable: copies from and to ",
               options.device.str(),
               " are slower and hold up the thread that starts them. \"pin_memory\": false asks for that");
}

void PinnedArena::Region::map(const std::string& purpose) {
  data_ = static_cast<std::byte*>(huge_pages_ ? map_aligned(size_) : map_pages(size_));
  require<ConfigError>(
      data_ != nullptr, "host memory for ", purpose, ": cannot map ", size_, " bytes: ", SystemReason(errno),
      ". Offload less, or raise the limits of this process (ulimit -v, vm.overcommit_memory, ", "vm.max_map_count)");
  if (huge_pages_) huge_pages_ = madvise(data_, size_, MADV_HUGEPAGE) == 0;
  const int error = touch_pages(data_, size_);
  if (error == 0) return;
  munmap(data_, size_);
  throw ConfigError(cat("host memory for ", purpose, ": cannot fill ", size_, " bytes with pages: ",
                        SystemReason(error), ". Offload less, or start fewer ranks on this host"));
}

PinnedArena::Region::~Region() {
  if (data_ == nullptr) return;
  if (pinned_ && process_.is_this()) comm::cuda_plugin().unregister_host_memory(data_);
  munmap(data_, size_);
}

size_t PinnedArena::bytes_of(int64_t numel, at::ScalarType dtype) {
  ensure(numel >= 0, "a tensor has no negative length");
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  return static_cast<size_t>(round_up(bytes, kAlignment));
}

PinnedArena::PinnedArena(std::string purpose, size_t bytes, ArenaOptions options)
    : purpose_(std::move(purpose)), region_(std::make_shared<Region>(purpose_, bytes, options)) {}

at::Tensor PinnedArena::take(int64_t numel, at::ScalarType dtype) {
  const size_t bytes = bytes_of(numel, dtype);
  ensure(bytes <= region_->size() - used_, "an arena is as large as all that is taken from it");
  std::byte* const data = bytes == 0 ? region_->data() : region_->data() + used_;
  used_ += bytes;
  return at::from_blob(
      data, {numel}, [region = region_](void*) {}, at::TensorOptions(dtype));
}

size_t PinnedArena::size() const { return region_->size(); }
bool PinnedArena::pinned() const { return region_->pinned(); }
bool PinnedArena::huge_pages() const { return region_->huge_pages(); }

// Each storage that has memory, once.
std::vector<MovedStorage::Part> MovedStorage::parts_of(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    const at::Storage& storage = tensor.storage();
    if (storage.nbytes() > 0 && seen.insert(storage.unsafeGetStorageImpl()).second) parts.push_back({tensor, {}});
  }
  return parts;
}

int64_t MovedStorage::arena_bytes(const std::vector<at::Tensor>& tensors) {
  size_t total = 0;
  for (const Part& part : parts_of(tensors)) {
    total += PinnedArena::bytes_of(static_cast<int64_t>(part.tensor.storage().nbytes()), at::kByte);
  }
  return static_cast<int64_t>(total);
}

MovedStorage::MovedStorage(const std::vector<at::Tensor>& tensors, const std::string& purpose,
                           const ArenaOptions& options)
    : parts_(parts_of(tensors)) {
  const at::NoGradGuard no_grad;
  PinnedArena arena(purpose, static_cast<size_t>(arena_bytes(tensors)), options);
  for (Part& part : parts_) {
    const at::Tensor bytes = bytes_of(part.tensor);
    part.copy = arena.take(bytes.numel(), at::kByte).copy_(bytes);
    bytes_ += bytes.numel();
  }
  for (const Part& part : parts_) take_storage(part.tensor);
}

void MovedStorage::restore() {
  const at::NoGradGuard no_grad;
  for (; !parts_.empty(); parts_.pop_back()) {
    const Part& part = parts_.back();
    const c10::DeviceGuard guard(part.tensor.device());
    const size_t length = part.copy.nbytes();
    give_storage(part.tensor, c10::GetAllocator(part.tensor.device().type())->allocate(length), length);
    bytes_of(part.tensor).copy_(part.copy);
    bytes_ -= static_cast<int64_t>(length);
  }
}

}  // namespace ds::offload
