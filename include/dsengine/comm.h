// Collectives on tensors between a group of ranks.
//
// A Communicator is one rank's handle on a group. Every rank of the group must issue the same collectives in the same
// order with matching shapes; implementations that can check this throw CommError naming both operations. Operations
// are asynchronous: they return a Work, and neither the tensors' contents nor their storage may be touched before
// wait(). None of them records a gradient (dsengine/collectives.h has those that do). A handle may be used from one
// thread at a time (the engine's hooks hold the reducer's lock). Tensors must be contiguous. On the CPU the
// dtypes are float32, float64, bfloat16, float16, int8, uint8, int16, int32, int64 and bool (copies, kMin, kMax, kBand
// and kBor alone). An
// undefined or strided tensor, sizes that do not fit, and a rank outside of the group are a UsageError. In a group of
// one rank collectives return at once and are not counted.
//
// The vocabulary is that of c10d and NCCL. engine::init_distributed makes the communicator of a job, and sets the limit
// of every wait. This header includes none of LibTorch's.
#pragma once

#include <array>
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

// Opaque to programs: the state of an operation, its description, an observer of operations, the state that a group
// shares with the groups made from it, and the watch that reports stalls.
class WorkState;
struct Collective;
class CollectiveObserver;
struct GroupFamily;
class FlightWatch;

// The ways ranks exchange tensors, as the key communication_backend names them.
enum class Backend : uint8_t {
  kAuto,  // chosen by device and hosts (docs/communication.md)
  kGloo,  // TCP; CPU tensors, and CUDA tensors by way of host memory
  kShm,   // shared memory; CPU tensors of ranks on one host
  kNccl,  // CUDA tensors, one device per rank
};

// Options of the flight recorder, the record of collectives that every rank keeps, and of the watch that reports stalls
// (docs/failures.md).
struct FlightWatchOptions {
  // How long a rank may wait in one collective until a report; 0: no limit. Sequences of collectives are compared
  // anyway.
  std::chrono::milliseconds stall_limit{std::chrono::seconds(60)};
  uint32_t entries = 512;   // collectives that each rank remembers
  std::string folder;       // for records; empty: $DS_FLIGHT_FOLDER, else dsengine-UID in the system's temporary folder
  bool stacks = true;       // takes a free real-time signal of the process, to see where a late rank is
  bool end_process = true;  // ends a process that hangs after the report; false: it is left as it is
};

// How a reduction combines the elements of ranks. kBand, kBor and kBxor combine bits of integers; kBand and kBor take
// bool too.
enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

// What a group is for: all operations, or isend and irecv only. A group for messages takes no memory for collectives.
enum class GroupUse : uint8_t { kAll, kMessages };

// The kinds of operation that CommCounters counts separately.
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
  // Whether the operation has finished, so that wait() returns at once.
  bool is_completed() const;
  // Whether wait() would return without waiting for another rank; it may still have work to do on this rank. The call
  // itself may start the next stage of the operation.
  bool is_ready() const;
  // Waits until the operation has finished. With NCCL it does not block the host: work given to the current CUDA stream
  // afterwards runs after the operation. On the CPU throws CommError where another rank has failed or
  // the time limit is over. With NCCL c10d's watchdog ends the process then (docs/communication.md).
  void wait() const;

 private:
  std::shared_ptr<WorkState> state_;
};

// The bytes this rank has sent, and its calls, by kind of operation. Bytes are those that a bandwidth-optimal algorithm
// must send, for n bytes in the full tensor and W ranks. all_reduce counts 2n(W-1)/W, reduce_scatter and all_gather
// n(W-1)/W. broadcast counts n and scatter n(W-1)/W, on the root only. reduce and gather count the bytes of this rank's
// input, except on the root; all_to_all counts the parts for other ranks; send counts its tensor, except to itself.
struct CommCounters {
  std::array<int64_t, kCollectiveKinds> bytes_sent{};  // indexed by CollectiveKind
  std::array<int64_t, kCollectiveKinds> calls{};
  int64_t total_bytes_sent() const;
};

// One rank's handle on a group of ranks; see the top of this file. A `label` names the operation in messages. W is the
// number of ranks of the group.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // This rank's number in the group, from 0, and the number of ranks.
  int rank() const { return rank_; }
  int size() const { return size_; }
  // The group's name in messages: "world", "data", ...
  const std::string& name() const { return name_; }
  // Bytes and calls of this rank since the last reset.
  const CommCounters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  // Reduces the tensors of all ranks, in place on every rank. Every rank gives the same shape.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, std::string label = {});
  // Copies root's tensor into the tensors of all ranks, which have its shape.
  Work broadcast(const at::Tensor& tensor, int root, std::string label = {});
  // Reduces the tensors of all ranks in place on root; elsewhere the tensor's contents are unspecified afterwards.
  Work reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum, std::string label = {});
  // Gathers input of every rank into output, which has W times its elements: rank r's input becomes the r-th part.
  // input may alias its own part of output (in place).
  Work all_gather(const at::Tensor& output, const at::Tensor& input, std::string label = {});
  // Reduces input over the ranks; output of rank r becomes the r-th part of the result and has 1/W of the elements.
  // output may alias this rank's part of input (in place); the other parts of input are unchanged.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      std::string label = {});
  // Gathers input of every rank into root's output, which has W times its elements; others pass an undefined tensor.
  Work gather(const at::Tensor& output, const at::Tensor& input, int root, std::string label = {});
  // Sends the r-th part of root's input, which has W times the elements of output, to rank r's output.
  Work scatter(const at::Tensor& output, const at::Tensor& input, int root, std::string label = {});
  // Sends part j of input to rank j, and receives part i of output from rank i. Splits are the numbers of rows
  // (dimension 0) of the parts; empty: the parts are equal. input and output must not overlap.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits = {},
                  std::vector<int64_t> input_splits = {}, std::string label = {});
  // Messages from rank to rank, blocking and asynchronous. Messages match by source, destination and tag (0 to 65535)
  // in their order; on NCCL, which knows no tags, by source and destination. The two directions between two ranks do
  // not block each other, and messages do not block collectives. On NCCL the first message between two ranks blocks the
  // host until the other rank posts its side: a program that posts receives ahead sends a first message between all
  // pairs that will talk, in one order (docs/communication.md).
  void send(const at::Tensor& tensor, int destination, int tag = 0) { isend(tensor, destination, tag).wait(); }
  void recv(const at::Tensor& tensor, int source, int tag = 0) { irecv(tensor, source, tag).wait(); }
  Work isend(const at::Tensor& tensor, int destination, int tag = 0, std::string label = {});
  Work irecv(const at::Tensor& tensor, int source, int tag = 0, std::string label = {});
  // Blocks the host until all ranks have called it.
  void barrier(std::string label = {});

  // Makes a communicator over `ranks` (ascending, numbers in this group). Every rank of this group calls it; ranks that
  // are not in `ranks` get nullptr.
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks, const std::string& name,
                                          GroupUse use = GroupUse::kAll);

  // Adds an observer, which sees operations of this group, and of groups made from it later. Call before the first
  // operation.
  void observe_with(std::shared_ptr<CollectiveObserver> observer);
  // Tells the observers what the program does from now on: "backward", "step", ...; micro_step -1: none. Each different
  // text is kept for the rest of the process, so give few of them. Later operations of this group, of groups made from
  // it and of the group that it was made from are marked with `name` and `step`, and messages about ranks that differ
  // name both.
  void note_phase(const char* name, int64_t step, int64_t micro_step = -1) const;
  // Keeps `watch`, which watches the ranks of this group, alive as long as this communicator.
  void keep_watch(std::shared_ptr<FlightWatch> watch);
  // The watch; null: nobody watches.
  const std::shared_ptr<FlightWatch>& watch() const { return watch_; }

 protected:
  Communicator(int rank, int size, std::string name);
  // Returns the text with which operations under way are to end, because an observer knows that waiting is in vain;
  // empty: they may go on. Any thread.
  std::string verdict() const;
  // Starts a validated operation. With size() == 1 it is called only for messages of the rank to itself.
  virtual Work launch(Collective collective) = 0;
  virtual std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) = 0;
  // Makes a group for messages alone; for implementations whose groups take memory for collectives.
  virtual std::shared_ptr<Communicator> make_message_group(const std::vector<int>& ranks, const std::string& name) {
    return make_group(ranks, name);
  }

 private:
  // An observer and how it knows this group.
  struct Observation {
    std::shared_ptr<CollectiveObserver> observer;
    int group;               // the observer's number of this group
    std::vector<int> ranks;  // the ranks of this group, in the group that it was attached to
  };

  Work checked_launch(Collective collective);
  // Launches inside of observers_[first] and those after it. Moves from `collective`.
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
  std::shared_ptr<GroupFamily> family_;  // shared with the groups that are made from this one
  std::shared_ptr<FlightWatch> watch_;
};

}  // namespace ds::comm
