// Tagged messages of bytes between the ranks of a gloo group: what GlooCommunicator builds its collectives from.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "comm/gloo/gloo_communicator.h"
#include "core/text.h"

namespace ds::comm {

// Posts and completes messages. Messages of one (sender, receiver, tag) keep their order; a message must be received
// with the length it was sent with. Thread safe: the worker of a communicator and its owner both post.
//
// Note [The first loss]: a rank that fails closes its connections, so that the others fail too, and those may see it go
// before they see the rank that really died. So whoever loses a peer writes it into the group's store before it closes
// anything; the first entry is the cause, and every message repeats it.
//
// gloo is a rendezvous protocol: bytes travel only once the receiver has posted its buffer, straight into that buffer.
class GlooWire {
 public:
  // A message under way. Its memory belongs to the caller and must stay until complete() returned.
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;
    int peer = 0;
    bool sending = false;
  };

  // `backend` is that of the group; null for a group of one.
  GlooWire(const GlooGroup& group, c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // bytes > 0; tag in [0, 2^31). Throws CommError as complete() when the connection is known to be gone.
  Message post_send(const void* data, int64_t bytes, int peer, int tag, const Printable& what);
  Message post_recv(void* data, int64_t bytes, int peer, int tag, const Printable& what);

  // Returns when the message has left or arrived. Throws CommError naming `what` (an operation and its label), this
  // rank, the peer, the first loss and what to look at: when the peer closed its connection or the time limit passed.
  void complete(const Message& message, const Printable& what);

  // Lets go, after a failure, of the connections, so that ranks that wait for this one learn of it, and makes every
  // later post throw `reason`.
  void close(const std::string& reason);

 private:
  Message post(void* data, int64_t bytes, int peer, int tag, bool sending, const Printable& what);
  std::string describe_peer(int peer) const;
  // See Note [The first loss]. Empty when it is this very loss.
  std::string report_loss(int peer);

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string group_;
  std::vector<std::string> peers_;
  std::chrono::milliseconds timeout_;
  int rank_;
  int size_;
  std::string closed_because_;
};

}  // namespace ds::comm
