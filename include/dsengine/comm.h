// Collectives on tensors between a group of ranks.
//
// A Communicator is one rank's handle on a group. Every rank of the group must issue the same collectives in the same
// order with matching shapes; implementations that can check this throw CommError naming both operations. Operations
// are asynchronous: they return a Work, and neither the tensors' contents nor their storage may be touched before
// wait(). A handle may be used from one thread at a time (the engine's hooks hold the reducer's lock). Tensors must be
// contiguous; on CPU any of float32, float64, bfloat16, float16, int8, uint8, int16, int32, int64, bool (bool: only
// copies, min, max, band, bor).
//
// The vocabulary is that of c10d and NCCL. engine::init_distributed makes the communicator of a job. Torch-free.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}

namespace ds::comm {

// What implementations and observers know of an operation; none of a program's business.
class WorkState;
struct Collective;
class CollectiveObserver;
class FlightWatch;

// The ways ranks exchange tensors, as the key communication_backend names them.
enum class Backend : uint8_t {
  kAuto,  // by device and hosts (docs/communication.md)
  kGloo,  // TCP; CPU tensors, and CUDA tensors by way of host memory
  kShm,   // shared memory; CPU tensors of ranks on one host
  kNccl,  // CUDA tensors, one device per rank
};

// Of the record of collectives that every rank keeps, and of who watches over it (docs/failures.md).
struct FlightWatchOptions {
  // Of waiting in one collective; 0: no limit, sequences of collectives are compared all the same.
  std::chrono::milliseconds stall_limit{std::chrono::seconds(60)};
  uint32_t entries = 512;   // collectives that each rank remembers
  std::string folder;       // for records; empty: $DS_FLIGHT_FOLDER, else dsengine-UID in the system's temporary folder
  bool stacks = true;       // takes a free real-time signal of the process, to see where a late rank is
  bool end_process = true;  // false: a process that hangs after the verdict is left as it is
};

// How the elements of ranks become one. kBand, kBor and kBxor: bits of integers, and truth values.
enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

// What a group is made for: all operations, or isend and irecv alone, which takes no memory for collectives.
enum class GroupUse : uint8_t { kAll, kMessages };

// What CommCounters counts apart.
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

// A handle on an operation under way; copyable; a default-constructed Work is a finished one. Destroying it does not
// wait.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  // The operation has finished, and wait() returns at once.
  bool is_completed() const;
  // wait() would not wait for other ranks (but may have work to do). May itself begin what follows.
  bool is_ready() const;
  // Returns when the operation has finished (CUDA: when the current stream is ordered after it). Throws CommError.
  void wait() const;

 private:
  std::shared_ptr<WorkState> state_;
};

// Bytes this rank has handed to others, and calls, by kind of operation: what a bandwidth-optimal algorithm must send
// (n = bytes of the whole tensor, W = ranks): all_reduce 2n(W-1)/W, reduce_scatter and all_gather n(W-1)/W, broadcast
// and scatter n (root only; scatter n(W-1)/W), reduce and gather own n (non-roots only), all_to_all what goes to
// others.
struct CommCounters {
  std::array<int64_t, kCollectiveKinds> bytes_sent{};  // by CollectiveKind
  std::array<int64_t, kCollectiveKinds> calls{};
  int64_t total_bytes_sent() const;
};

// One rank's handle on a group of ranks, as told above. A `label` names the operation in messages.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Of this rank in the group, from 0; and how many there are.
  int rank() const { return rank_; }
  int size() const { return size_; }
  // For messages: "world", "data", ...
  const std::string& name() const { return name_; }
  // What this rank has sent since the last reset.
  const CommCounters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  // In place; the same shape on every rank.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, std::string label = {});
  Work broadcast(const at::Tensor& tensor, int root, std::string label = {});
  // The result is on root only; elsewhere the tensor's contents are unspecified afterwards.
  Work reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum, std::string label = {});
  // output has W times the elements of input; rank r's input lands in the r-th part. input may alias its own part of
  // output (in place).
  Work all_gather(const at::Tensor& output, const at::Tensor& input, std::string label = {});
  // input has W times the elements of output; output becomes the r-th part of the reduction. output may alias the own
  // part of input (in place); the other parts of input are unchanged.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      std::string label = {});
  // output (root only; pass an undefined tensor elsewhere) has W times the elements of input.
  Work gather(const at::Tensor& output, const at::Tensor& input, int root, std::string label = {});
  // input (root only) has W times the elements of output.
  Work scatter(const at::Tensor& output, const at::Tensor& input, int root, std::string label = {});
  // Part j of input goes to rank j; part i of output comes from rank i. Splits count elements of dimension 0 and may be
  // empty for an even split. input and output must not overlap.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits = {},
                  std::vector<int64_t> input_splits = {}, std::string label = {});
  // Blocking and asynchronous point to point. Messages of one (source, destination, tag) keep their order. Messages of
  // the two directions between two ranks, and messages and collectives, do not wait for one another. On NCCL the first
  // message between two ranks blocks the host until the other comes to one with this rank: a program that posts
  // receives ahead sends a first message between all pairs that will talk, in one order (docs/communication.md).
  void send(const at::Tensor& tensor, int destination, int tag = 0) { isend(tensor, destination, tag).wait(); }
  void recv(const at::Tensor& tensor, int source, int tag = 0) { irecv(tensor, source, tag).wait(); }
  Work isend(const at::Tensor& tensor, int destination, int tag = 0, std::string label = {});
  Work irecv(const at::Tensor& tensor, int source, int tag = 0, std::string label = {});
  // Returns when all ranks have called it.
  void barrier(std::string label = {});

  // A communicator over `ranks` (ascending, ranks of this group). Called by every rank of this group, also by those not
  // in `ranks`, which get nullptr.
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks, const std::string& name,
                                          GroupUse use = GroupUse::kAll);

  // Operations from now on, and those of groups made from now on, are shown to it, beside other
  // observers. Call before the first operation.
  void observe_with(std::shared_ptr<CollectiveObserver> observer);
  // Tells the observers what the program does from now on: "backward", "step", ...; micro_step -1: none. Operations of
  // this group, and of groups made from it, then carry the step: what ranks that part are told names it.
  void note_phase(const char* name, int64_t step, int64_t micro_step = -1) const;
  // Keeps what watches the ranks of this group, until it ends itself.
  void keep_watch(std::shared_ptr<FlightWatch> watch);
  // Null: nobody watches.
  const std::shared_ptr<FlightWatch>& watch() const { return watch_; }

 protected:
  Communicator(int rank, int size, std::string name);
  // Starts a validated operation. Never called with size() == 1 except for barrier and self send/recv.
  virtual Work launch(Collective collective) = 0;
  virtual std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) = 0;
  // For implementations that keep something for collectives.
  virtual std::shared_ptr<Communicator> make_message_group(const std::vector<int>& ranks, const std::string& name) {
    return make_group(ranks, name);
  }

 private:
  // One that observes this group.
  struct Observation {
    std::shared_ptr<CollectiveObserver> observer;
    int group;               // its number of this group
    std::vector<int> ranks;  // of this group, in the group that it was attached to
  };

  Work checked_launch(Collective collective);
  // Within observers_[first] and those after it. Takes what is in `collective`.
  Work observed_launch(Collective& collective, size_t first);
  void count(const Collective& collective);
  Work copy_alone(const at::Tensor& output, const at::Tensor& input) const;
  void require_peer(const char* what, const std::string& label, int peer) const;
  void require_splits(const std::string& label, const char* role, const at::Tensor& tensor,
                      const std::vector<int64_t>& splits) const;

  int rank_;
  int size_;
  std::string name_;
  CommCounters counters_;
  std::vector<Observation> observers_;
  std::shared_ptr<std::atomic<int64_t>> step_;  // note_phase(); 0: nobody has said
  std::shared_ptr<FlightWatch> watch_;
};

}  // namespace ds::comm
