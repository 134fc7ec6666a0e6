// send and recv between the ranks of a group on one host: a ring of bytes in shared memory for each pair of ranks, and
// a thread per rank that moves messages between tensors and rings.
//
// Messages are independent of the collectives and of messages to and from other ranks. A send is done when its last
// byte is in the ring. A receiver takes messages out of a ring while it has a receive from that rank that is not yet
// served; what then turns up with another tag is kept in memory until it is asked for.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <iosfwd>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/collective.h"
#include "comm/shared_memory/shared_memory_layout.h"
#include "comm/shared_memory/shared_memory_peers.h"
#include "dsengine/comm.h"

namespace ds::comm {

// A send or recv under way. Holds its tensor until done.
class SharedMemoryMessage final : public WorkState {
 public:
  SharedMemoryMessage(const Collective& collective, SharedMemoryPeers::Clock::time_point deadline);

  bool is_completed() override;
  void wait() override;
  void finish(std::exception_ptr error = nullptr);

  int peer() const { return peer_; }
  const MessageHead& head() const { return head_; }
  std::byte* data() const { return data_; }
  SharedMemoryPeers::Clock::time_point deadline() const { return deadline_; }
  // "recv of 12 Float 'activation' from rank 1, tag 0"
  friend std::ostream& operator<<(std::ostream& out, const SharedMemoryMessage& message);

 private:
  const bool is_send_;
  const int peer_;
  MessageHead head_;
  at::Tensor tensor_;
  std::vector<std::shared_ptr<OperationTimer>> timers_;
  std::byte* data_;
  const SharedMemoryPeers::Clock::time_point deadline_;
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
};

class SharedMemoryMessages {
 public:
  // on_failure is called on the thread of the messages with the error that ended them.
  SharedMemoryMessages(GroupMemory& memory, SharedMemoryPeers& peers, int rank,
                       std::function<void(const std::string&)> on_failure);
  // Returns when no message is under way (SharedMemoryPeers::abandon_at bounds it).
  ~SharedMemoryMessages();
  SharedMemoryMessages(const SharedMemoryMessages&) = delete;
  SharedMemoryMessages& operator=(const SharedMemoryMessages&) = delete;

  // kSend or kRecv, on any thread. Starts the thread when it is the first.
  std::shared_ptr<WorkState> post(const Collective& collective);

 private:
  using Message = std::shared_ptr<SharedMemoryMessage>;
  struct Outgoing {
    std::deque<Message> queue;
    size_t sent = 0;  // bytes of the front message (head and data) that are in the ring
  };
  struct Held {
    MessageHead head;
    std::vector<std::byte> data;
  };
  struct Incoming {
    std::list<Message> posted;
    std::list<Held> held;
    bool receiving = false;  // a message is being read: into `target`, or into `other`
    MessageHead head;
    size_t received = 0;
    Message target;
    Held other;
  };

  void loop();
  bool take_posted();  // false when stopping
  bool idle() const;
  bool move_all();
  bool move_out(int destination);
  bool move_in(int source);
  bool begin_message(int source);
  void end_message(int source);
  void serve_from_held(int source, const Message& message);
  void require_match(int source, const SharedMemoryMessage& message, const MessageHead& head) const;
  Message take_match(int source, int32_t tag);
  void check_hope() const;
  void fail_all(const std::exception_ptr& error);

  size_t write_ring(int destination, const std::byte* data, size_t bytes);
  size_t read_ring(int source, std::byte* data, size_t bytes);

  GroupMemory& memory_;
  SharedMemoryPeers& peers_;
  const int rank_;
  const std::function<void(const std::string&)> on_failure_;

  std::mutex mutex_;
  std::deque<std::pair<bool, Message>> inbox_;  // is it a send
  bool stopping_ = false;
  std::exception_ptr failure_;
  uint64_t posted_ = 0;  // messages so far

  // The state of the thread alone.
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::thread thread_;
};

}  // namespace ds::comm
