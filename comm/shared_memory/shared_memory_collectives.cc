#include "comm/shared_memory/shared_memory_collectives.h"

#include <algorithm>
#include <cstring>

#include "comm/flight/rank_list.h"
#include "comm/local_reduce.h"
#include "core/check.h"

namespace ds::comm {
namespace {

// Up to this size per rank all_reduce reduces everything on every rank: one synchronisation instead of two.
constexpr int64_t kSmallBytes = 8 << 10;

std::byte* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::byte*>(tensor.data_ptr()) : nullptr;
}

int64_t nbytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

void copy_bytes(std::byte* destination, const std::byte* source, int64_t bytes) {
  if (bytes > 0 && destination != source) std::memcpy(destination, source, static_cast<size_t>(bytes));
}

int64_t chunks_of(int64_t bytes, int64_t chunk) { return std::max<int64_t>(1, (bytes + chunk - 1) / chunk); }

// Whole cache lines per part, so that parts hold whole elements and writers never share a line.
int64_t aligned_part(int64_t bytes, int64_t parts) { return (bytes / parts) / 64 * 64; }

int64_t even_part(int64_t bytes, int64_t parts) { return ((bytes + parts - 1) / parts + 63) / 64 * 64; }

}  // namespace

OperationRecord record_of(const Collective& collective, int size) {
  OperationRecord record{};
  record.step = collective.step;
  record.kind = collective.kind;
  record.root = -1;
  record.dtype = static_cast<int8_t>(at::kByte);
  copy_text(record.label, collective.label);
  copy_text(record.phase, collective.phase);
  const at::Tensor& input = collective.input;
  const at::Tensor& part =
      collective.kind == CollectiveKind::kScatter || collective.kind == CollectiveKind::kReduceScatter
          ? collective.output
          : input;
  if (part.defined()) {
    record.dtype = static_cast<int8_t>(part.scalar_type());
    record.count = collective.kind == CollectiveKind::kAllToAll ? 0 : part.numel();
  }
  switch (collective.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      record.op = collective.op;
      break;
    case CollectiveKind::kReduce:
      record.op = collective.op;
      record.root = collective.peer;
      break;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
      record.root = collective.peer;
      break;
    default:
      break;
  }
  return record;
}

SharedMemoryCollectives::SharedMemoryCollectives(GroupMemory& memory, SharedMemoryPeers& peers, int rank)
    : memory_(memory), peers_(peers), rank_(rank), size_(memory.size()), sources_(static_cast<size_t>(memory.size())) {}

void SharedMemoryCollectives::run(const Collective& collective, OperationRecord record) {
  begin(record);
  std::byte* const output = data_of(collective.output);
  const std::byte* const input = data_of(collective.input);
  const at::ScalarType dtype{record.dtype};
  switch (collective.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      return nbytes_of(collective.input) <= kSmallBytes
                 ? all_reduce_small(output, record.count, dtype, record.op, record.root)
                 : all_reduce(output, record.count, dtype, record.op, record.root);
    case CollectiveKind::kReduceScatter:
      return reduce_scatter(output, input, record.count, dtype, record.op);
    case CollectiveKind::kBroadcast:
      return broadcast(output, nbytes_of(collective.output), record.root);
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      return gather(output, input, nbytes_of(collective.input), record.root);
    case CollectiveKind::kScatter:
      return scatter(output, input, nbytes_of(collective.output), record.root);
    case CollectiveKind::kAllToAll:
      return all_to_all(collective);
    case CollectiveKind::kBarrier:
      return barrier();
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      break;
  }
  ensure(false, "messages do not go through the collectives");
}

void SharedMemoryCollectives::begin(OperationRecord record) {
  record.sequence = ++sequence_;
  record_ = record;
  agreed_ = false;
  RankBlock& own = memory_.rank(rank_);
  own.operations[sequence_ % 2].store(record_);
  own.begun.store(sequence_, std::memory_order_relaxed);
  peers_.require_none_failed(record_);
}

// Note [Slots of announcements]: a rank's record of operation s stays in its slot until the rank begins s + 2, before
// which it has seen all ranks begin s + 1: so whoever still checks the records of s finds them whole.
void SharedMemoryCollectives::synchronize() {
  memory_.rank(rank_).progress.publish(++step_);
  peers_.await_step(step_, record_);
  if (!agreed_) require_agreement();
  agreed_ = true;
}

void SharedMemoryCollectives::require_agreement() const {
  for (int peer = 0; peer < size_; ++peer) {
    const OperationRecord other = memory_.rank(peer).operations[sequence_ % 2].load();
    require<CommError>(
        record_.agrees_with(other), peers_.group(), ": ranks issued different collectives: ", lazy([&] {
          return phases_in_words({{record_.phase, {rank_}}, {other.phase, {peer}}});
        }),
        "rank ", rank_, " ", record_, ", rank ", peer, " ", other,
        "; every rank must issue the same collectives, with matching sizes and types, in the same order");
  }
}

void SharedMemoryCollectives::two_stages(int64_t chunks, const Chunk& fill, const Chunk& consume) {
  for (int64_t i = 0; i < chunks; ++i) {
    fill(i);
    if (i > 0) consume(i - 1);
    synchronize();
  }
  consume(chunks - 1);
  chunk_ += static_cast<uint64_t>(chunks);
}

void SharedMemoryCollectives::barrier() {
  synchronize();
  ++chunk_;
}

void SharedMemoryCollectives::broadcast(std::byte* data, int64_t bytes, int root) {
  const auto capacity = static_cast<int64_t>(memory_.slot_bytes());
  const auto length = [&](int64_t i) { return std::min(capacity, bytes - i * capacity); };
  two_stages(
      chunks_of(bytes, capacity),
      [&](int64_t i) {
        if (rank_ == root) copy_bytes(stage(rank_, i), data + i * capacity, length(i));
      },
      [&](int64_t i) {
        if (rank_ != root) copy_bytes(data + i * capacity, stage(root, i), length(i));
      });
}

void SharedMemoryCollectives::gather(std::byte* output, const std::byte* input, int64_t bytes, int root) {
  const auto capacity = static_cast<int64_t>(memory_.slot_bytes());
  const auto length = [&](int64_t i) { return std::min(capacity, bytes - i * capacity); };
  const bool receives = root < 0 || root == rank_;
  two_stages(
      chunks_of(bytes, capacity),
      [&](int64_t i) {
        if (root != rank_) copy_bytes(stage(rank_, i), input + i * capacity, length(i));
      },
      [&](int64_t i) {
        if (!receives) return;
        for (int peer = 0; peer < size_; ++peer) {
          const std::byte* from = peer == rank_ ? input + i * capacity : stage(peer, i);
          copy_bytes(output + peer * bytes + i * capacity, from, length(i));
        }
      });
}

void SharedMemoryCollectives::scatter(std::byte* output, const std::byte* input, int64_t bytes, int root) {
  const int64_t part = aligned_part(static_cast<int64_t>(memory_.slot_bytes()), size_);
  const auto length = [&](int64_t i) { return std::min(part, bytes - i * part); };
  two_stages(
      chunks_of(bytes, part),
      [&](int64_t i) {
        if (rank_ != root) return;
        for (int peer = 0; peer < size_; ++peer) {
          std::byte* to = peer == rank_ ? output + i * part : stage(rank_, i) + peer * part;
          copy_bytes(to, input + peer * bytes + i * part, length(i));
        }
      },
      [&](int64_t i) {
        if (rank_ != root) copy_bytes(output + i * part, stage(root, i) + rank_ * part, length(i));
      });
}

void SharedMemoryCollectives::reduce_chunk(std::byte* destination, const std::byte* own, int64_t chunk, int64_t offset,
                                           int64_t count, Arithmetic arithmetic) {
  if (count <= 0) return;
  for (int peer = 0; peer < size_; ++peer) {
    sources_[static_cast<size_t>(peer)] = peer == rank_ ? own : stage(peer, chunk) + offset;
  }
  local_reduce(destination, sources_, count, arithmetic.dtype, arithmetic.op);
}

void SharedMemoryCollectives::reduce_scatter(std::byte* output, const std::byte* input, int64_t count,
                                             at::ScalarType dtype, ReduceOp op) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t bytes = count * element;
  const int64_t part = aligned_part(static_cast<int64_t>(memory_.slot_bytes()), size_);
  const auto length = [&](int64_t i) { return std::min(part, bytes - i * part); };
  two_stages(
      chunks_of(bytes, part),
      [&](int64_t i) {
        for (int peer = 0; peer < size_; ++peer) {
          if (peer != rank_) copy_bytes(stage(rank_, i) + peer * part, input + peer * bytes + i * part, length(i));
        }
      },
      [&](int64_t i) {
        reduce_chunk(output + i * part, input + rank_ * bytes + i * part, i, rank_ * part, length(i) / element,
                     {dtype, op});
      });
}

void SharedMemoryCollectives::all_reduce_small(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op,
                                               int root) {
  two_stages(
      1, [&](int64_t i) { copy_bytes(stage(rank_, i), data, count * static_cast<int64_t>(c10::elementSize(dtype))); },
      [&](int64_t i) {
        if (root < 0 || root == rank_) reduce_chunk(data, data, i, 0, count, {dtype, op});
      });
}

void SharedMemoryCollectives::all_reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t bytes = count * element;
  const int64_t part = aligned_part(static_cast<int64_t>(memory_.slot_bytes()), size_);  // of a chunk, per rank
  const int64_t capacity = part * size_;
  const int64_t chunks = chunks_of(bytes, capacity);
  // The last chunk is shared out evenly, too.
  const auto part_of = [&](int64_t i) { return i + 1 < chunks ? part : even_part(bytes - i * capacity, size_); };
  const auto offset = [&](int64_t i, int64_t peer) { return peer * part_of(i); };
  const auto part_length = [&](int64_t i, int64_t peer) {
    return std::clamp<int64_t>(bytes - i * capacity - offset(i, peer), 0, part_of(i));
  };
  const bool receives = root < 0 || root == rank_;
  const auto fill = [&](int64_t i) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_)
        copy_bytes(stage(rank_, i) + offset(i, peer), data + i * capacity + offset(i, peer), part_length(i, peer));
    }
  };
  const auto reduce_own_part = [&](int64_t i) {
    std::byte* const own = data + i * capacity + offset(i, rank_);
    std::byte* const shared = stage(rank_, i) + offset(i, rank_);
    std::byte* const result = receives ? own : shared;
    reduce_chunk(result, own, i, offset(i, rank_), part_length(i, rank_) / element, {dtype, op});
    copy_bytes(shared, result, part_length(i, rank_));
  };
  const auto copy_other_parts = [&](int64_t i) {
    for (int peer = 0; peer < size_ && receives; ++peer) {
      if (peer != rank_)
        copy_bytes(data + i * capacity + offset(i, peer), stage(peer, i) + offset(i, peer), part_length(i, peer));
    }
  };
  for (int64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) fill(i);
    if (i >= 1) reduce_own_part(i - 1);
    if (i >= 2) copy_other_parts(i - 2);
    synchronize();
  }
  copy_other_parts(chunks - 1);
  chunk_ += static_cast<uint64_t>(chunks);
}

void SharedMemoryCollectives::all_to_all(const Collective& collective) {
  const std::vector<int64_t> sends = split_bytes(collective.input, collective.input_splits, size_);
  const std::vector<int64_t> receives = split_bytes(collective.output, collective.output_splits, size_);
  std::copy(sends.begin(), sends.end(), memory_.row(rank_, sequence_));
  barrier();
  int64_t longest = 0;
  for (int peer = 0; peer < size_; ++peer) {
    const int64_t* row = memory_.row(peer, sequence_);
    longest = std::max(longest, *std::max_element(row, row + size_));
    require<CommError>(row[rank_] == receives[static_cast<size_t>(peer)], peers_.group(), " rank ", rank_, ": ",
                       record_, ": expected ", receives[static_cast<size_t>(peer)], " bytes from rank ", peer,
                       ", which sends ", row[rank_],
                       "; output_splits here must equal that rank's input_splits for this rank");
  }
  const int64_t part = aligned_part(static_cast<int64_t>(memory_.slot_bytes()), size_);
  const auto for_each_piece = [&](int64_t i, const std::vector<int64_t>& lengths, const auto& visit) {
    int64_t begin = i * part;
    for (int peer = 0; peer < size_; ++peer) {
      const int64_t length = lengths[static_cast<size_t>(peer)];
      visit(peer, begin, std::min(part, length - i * part));
      begin += length;
    }
  };
  const std::byte* const input = data_of(collective.input);
  std::byte* const output = data_of(collective.output);
  two_stages(
      chunks_of(longest, part),
      [&](int64_t i) {
        for_each_piece(i, sends, [&](int peer, int64_t begin, int64_t length) {
          copy_bytes(stage(rank_, i) + peer * part, input + begin, length);
        });
      },
      [&](int64_t i) {
        for_each_piece(i, receives, [&](int peer, int64_t begin, int64_t length) {
          copy_bytes(output + begin, stage(peer, i) + rank_ * part, length);
        });
      });
}

}  // namespace ds::comm
