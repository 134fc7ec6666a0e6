#include "comm/shared_memory/shared_memory_layout.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <ostream>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "comm/collective.h"
#include "comm/flight/rank_list.h"
#include "core/check.h"

namespace ds::comm {
namespace {

// The word lives in memory that may be shared between processes, hence no FUTEX_PRIVATE_FLAG.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

}  // namespace

void Signal::publish(uint32_t new_value) {
  value.store(new_value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Signal::ring() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Signal::wake() { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Signal::sleep(uint32_t seen, std::chrono::microseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1'000'000;
  time.tv_nsec = limit.count() % 1'000'000 * 1000;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen) futex(&value, FUTEX_WAIT, seen, &time);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void relax_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int spin_turns(int ranks) {
  static const int kCores = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  return ranks < kCores ? 4000 : 200;
}

namespace {

// Three of them per rank stay in the last-level cache together with the tensors' current chunks.
constexpr size_t kSlotBytes = size_t{256} << 10;
constexpr size_t kAllRingsBytes = size_t{32} << 20;

size_t page_aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

bool OperationRecord::agrees_with(const OperationRecord& other) const {
  return sequence == other.sequence && kind == other.kind && op == other.op && dtype == other.dtype &&
         root == other.root && count == other.count && check == other.check &&
         std::strncmp(label, other.label, sizeof label) == 0;
}

std::ostream& operator<<(std::ostream& out, const OperationRecord& record) {
  if (record.sequence == 0) return out << "nothing yet";
  const CollectiveKind kind = record.kind;
  const bool reduces =
      kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce || kind == CollectiveKind::kReduceScatter;
  out << name_of(kind);
  if (reduces) out << " " << name_of(record.op);
  if (kind != CollectiveKind::kBarrier) out << " of " << record.count << " " << at::ScalarType{record.dtype};
  if (record.root >= 0) out << ", root " << record.root;
  if (record.label[0] != '\0') out << " '" << record.label << "'";
  out << " (#" << record.sequence;
  if (record.step > 0) out << ", step " << record.step;
  out << ")";
  return out << of_phase(record.phase);
}

std::ostream& operator<<(std::ostream& out, const MessageHead& head) {
  const auto dtype = static_cast<at::ScalarType>(head.dtype);
  out << head.bytes / static_cast<int64_t>(c10::elementSize(dtype)) << " " << dtype;
  return head.label[0] == '\0' ? out : out << " '" << head.label << "'";
}

std::ostream& operator<<(std::ostream& out, const MessageRecord& record) {
  out << (record.is_send != 0 ? "send of " : "recv of ") << record.head
      << (record.is_send != 0 ? " to rank " : " from rank ") << record.peer << " (message #" << record.sequence;
  if (record.step > 0) out << ", step " << record.step;
  return out << ")";
}

size_t GroupMemory::ring_bytes_for(int size) {
  const auto pairs = static_cast<size_t>(size) * static_cast<size_t>(size);
  return std::clamp(std::bit_floor(kAllRingsBytes / pairs), size_t{4} << 10, size_t{1} << 20);
}

GroupMemory::Offsets GroupMemory::offsets_for(int size) {
  const auto ranks = static_cast<size_t>(size);
  Offsets offsets{};
  offsets.rows = page_aligned(ranks * sizeof(RankBlock));
  offsets.ring_ends = page_aligned(offsets.rows + ranks * 2 * ranks * sizeof(int64_t));
  offsets.stages = page_aligned(offsets.ring_ends + ranks * ranks * sizeof(RingEnds));
  offsets.rings = offsets.stages + ranks * kSlots * kSlotBytes;
  // Pages hide how large a block is: its size counts, so that ranks with another layout see another size.
  offsets.end = offsets.rings + ranks * ranks * ring_bytes_for(size) + sizeof(RankBlock);
  return offsets;
}

size_t GroupMemory::bytes_for(int size) { return offsets_for(size).end; }

void GroupMemory::initialize(SharedRegion& region, int size) {
  const Offsets offsets = offsets_for(size);
  const auto ranks = static_cast<size_t>(size);
  for (size_t r = 0; r < ranks; ++r) new (region.data() + r * sizeof(RankBlock)) RankBlock;
  for (size_t p = 0; p < ranks * ranks; ++p) new (region.data() + offsets.ring_ends + p * sizeof(RingEnds)) RingEnds;
}

GroupMemory::GroupMemory(std::shared_ptr<SharedRegion> region, int size)
    : region_(std::move(region)), size_(size), ring_bytes_(ring_bytes_for(size)), offsets_(offsets_for(size)) {
  ensure(region_->bytes() == offsets_.end, "a group's region has the size that its ranks need");
}

size_t GroupMemory::slot_bytes() const { return kSlotBytes; }

RankBlock& GroupMemory::rank(int rank) const {
  return *std::launder(reinterpret_cast<RankBlock*>(region_->data() + static_cast<size_t>(rank) * sizeof(RankBlock)));
}

int64_t* GroupMemory::row(int rank, uint64_t sequence) const {
  const auto index = (static_cast<size_t>(rank) * 2 + sequence % 2) * static_cast<size_t>(size_);
  return reinterpret_cast<int64_t*>(region_->data() + offsets_.rows) + index;
}

std::byte* GroupMemory::stage(int rank, uint64_t chunk) const {
  return region_->data() + offsets_.stages + (static_cast<size_t>(rank) * kSlots + chunk % kSlots) * kSlotBytes;
}

RingEnds& GroupMemory::ring_ends(int source, int destination) const {
  const auto pair = static_cast<size_t>(source) * static_cast<size_t>(size_) + static_cast<size_t>(destination);
  return *std::launder(reinterpret_cast<RingEnds*>(region_->data() + offsets_.ring_ends + pair * sizeof(RingEnds)));
}

std::byte* GroupMemory::ring(int source, int destination) const {
  const auto pair = static_cast<size_t>(source) * static_cast<size_t>(size_) + static_cast<size_t>(destination);
  return region_->data() + offsets_.rings + pair * ring_bytes_;
}

}  // namespace ds::comm
