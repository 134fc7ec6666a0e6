// One operation between ranks, and a handle on it while it is under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ds::comm {

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

enum class CollectiveKind : uint8_t {
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
};
inline constexpr int kCollectiveKinds = 11;

const char* name_of(CollectiveKind kind);
const char* name_of(ReduceOp op);

// What an implementation tracks of one operation under way.
class WorkState {
 public:
  virtual ~WorkState() = default;
  virtual bool is_completed() = 0;
  // wait() would not wait for other ranks (but may have work to do). May itself begin what follows.
  virtual bool is_ready() { return is_completed(); }
  // Returns when the operation has finished (CUDA: when the current stream is ordered after it). Throws CommError.
  virtual void wait() = 0;
};

// A handle on an operation under way; copyable; a default-constructed Work is a finished one. Destroying it does not
// wait.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  bool is_completed() const { return !state_ || state_->is_completed(); }
  bool is_ready() const { return !state_ || state_->is_ready(); }
  void wait() const {
    if (state_) state_->wait();
  }

 private:
  std::shared_ptr<WorkState> state_;
};

// One operation, as implementations, counters and recorders see it.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  at::Tensor input;                    // undefined where a rank gives nothing (scatter on non-roots, recv, barrier)
  at::Tensor output;                   // undefined where a rank receives nothing (gather on non-roots, send, barrier)
  int peer = 0;                        // root, destination or source: a rank of this group
  int tag = 0;                         // send and recv only
  std::vector<int64_t> input_splits;   // all_to_all with uneven splits along dimension 0; empty = even
  std::vector<int64_t> output_splits;  // likewise
  std::string label;                   // parameter or bucket it belongs to, the same on all ranks; in errors
};

}  // namespace ds::comm
