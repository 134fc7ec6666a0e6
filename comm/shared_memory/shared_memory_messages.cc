#include "comm/shared_memory/shared_memory_messages.h"

#include <algorithm>
#include <cstring>
#include <ostream>

#include "core/check.h"

namespace ds::comm {
namespace {

using Clock = SharedMemoryPeers::Clock;

// The thread has nothing to do until something is posted, which rings its bell.
constexpr std::chrono::seconds kIdleSleep{10};

}  // namespace

SharedMemoryMessage::SharedMemoryMessage(const Collective& collective, Clock::time_point deadline)
    : is_send_(collective.kind == CollectiveKind::kSend),
      peer_(collective.peer),
      tensor_(is_send_ ? collective.input : collective.output),
      timers_(collective.timers),
      data_(static_cast<std::byte*>(tensor_.data_ptr())),
      deadline_(deadline) {
  head_.bytes = static_cast<int64_t>(tensor_.nbytes());
  head_.tag = collective.tag;
  head_.dtype = static_cast<int32_t>(tensor_.scalar_type());
  copy_text(head_.label, collective.label);
}

bool SharedMemoryMessage::is_completed() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void SharedMemoryMessage::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

void SharedMemoryMessage::finish(std::exception_ptr error) {
  tensor_.reset();
  if (!error) tell_end(timers_);
  timers_.clear();
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  finished_.notify_all();
}

std::ostream& operator<<(std::ostream& out, const SharedMemoryMessage& message) {
  return out << (message.is_send_ ? "send of " : "recv of ") << message.head_
             << (message.is_send_ ? " to rank " : " from rank ") << message.peer_ << ", tag " << message.head_.tag;
}

SharedMemoryMessages::SharedMemoryMessages(GroupMemory& memory, SharedMemoryPeers& peers, int rank,
                                           std::function<void(const std::string&)> on_failure)
    : memory_(memory),
      peers_(peers),
      rank_(rank),
      on_failure_(std::move(on_failure)),
      outgoing_(static_cast<size_t>(memory.size())),
      incoming_(static_cast<size_t>(memory.size())) {}

SharedMemoryMessages::~SharedMemoryMessages() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  memory_.rank(rank_).bell.ring();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<WorkState> SharedMemoryMessages::post(const Collective& collective) {
  auto message = std::make_shared<SharedMemoryMessage>(collective, Clock::now() + peers_.timeout());
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    const bool is_send = collective.kind == CollectiveKind::kSend;
    inbox_.emplace_back(is_send, message);
    memory_.rank(rank_).message.store({.sequence = ++posted_,
                                       .step = collective.step,
                                       .is_send = is_send ? 1 : 0,
                                       .peer = collective.peer,
                                       .head = message->head()});
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  memory_.rank(rank_).bell.ring();
  return message;
}

void SharedMemoryMessages::loop() {
  Signal& bell = memory_.rank(rank_).bell;
  int turn = 0;
  try {
    for (;;) {
      const uint32_t seen = bell.value.load(std::memory_order_acquire);
      const bool more_may_come = take_posted();
      if (!more_may_come && idle()) return;
      if (move_all()) {
        turn = 0;
      } else if (!idle() && turn < peers_.spin_turns()) {
        ++turn;
        relax_core();
      } else {
        bell.sleep(seen, idle() ? std::chrono::microseconds(kIdleSleep) : SharedMemoryPeers::kLook);
        if (move_all()) continue;
        check_hope();
      }
    }
  } catch (const CommError& error) {
    on_failure_(error.what());
    fail_all(std::current_exception());
  }
}

bool SharedMemoryMessages::take_posted() {
  std::deque<std::pair<bool, Message>> posted;
  bool stopping = false;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(inbox_);
    stopping = stopping_;
  }
  for (auto& [is_send, message] : posted) {
    const auto peer = static_cast<size_t>(message->peer());
    if (is_send) {
      outgoing_[peer].queue.push_back(std::move(message));
    } else {
      incoming_[peer].posted.push_back(message);
      serve_from_held(message->peer(), message);
    }
  }
  return !stopping;
}

bool SharedMemoryMessages::idle() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& out) { return out.queue.empty(); }) &&
         std::all_of(incoming_.begin(), incoming_.end(),
                     [](const Incoming& in) { return in.posted.empty() && !in.target; });
}

bool SharedMemoryMessages::move_all() {
  bool moved = false;
  for (int peer = 0; peer < memory_.size(); ++peer) {
    moved |= move_out(peer);
    moved |= move_in(peer);
  }
  return moved;
}

bool SharedMemoryMessages::move_out(int destination) {
  Outgoing& out = outgoing_[static_cast<size_t>(destination)];
  bool moved = false;
  while (!out.queue.empty()) {
    const Message& message = out.queue.front();
    const size_t head_bytes = sizeof(MessageHead);
    const size_t total = head_bytes + static_cast<size_t>(message->head().bytes);
    const std::byte* from = out.sent < head_bytes ? reinterpret_cast<const std::byte*>(&message->head()) + out.sent
                                                  : message->data() + (out.sent - head_bytes);
    const size_t wanted = out.sent < head_bytes ? head_bytes - out.sent : total - out.sent;
    const size_t written = write_ring(destination, from, wanted);
    out.sent += written;
    moved |= written > 0;
    if (out.sent == total) {
      message->finish();
      out.queue.pop_front();
      out.sent = 0;
      moved = true;
    } else if (written == 0) {
      break;
    }
  }
  if (moved) memory_.rank(destination).bell.ring();
  return moved;
}

bool SharedMemoryMessages::move_in(int source) {
  Incoming& in = incoming_[static_cast<size_t>(source)];
  bool moved = false;
  while (in.receiving || begin_message(source)) {
    std::byte* const to = (in.target ? in.target->data() : in.other.data.data()) + in.received;
    const size_t read = read_ring(source, to, static_cast<size_t>(in.head.bytes) - in.received);
    in.received += read;
    moved |= read > 0;
    if (in.received == static_cast<size_t>(in.head.bytes)) {
      end_message(source);
      moved = true;
    } else if (read == 0) {
      break;
    }
  }
  if (moved) memory_.rank(source).bell.ring();
  return moved;
}

bool SharedMemoryMessages::begin_message(int source) {
  Incoming& in = incoming_[static_cast<size_t>(source)];
  const RingEnds& ends = memory_.ring_ends(source, rank_);
  const uint64_t waiting = ends.written.load(std::memory_order_acquire) - ends.read.load(std::memory_order_relaxed);
  if (in.posted.empty() || waiting < sizeof(MessageHead)) return false;
  read_ring(source, reinterpret_cast<std::byte*>(&in.head), sizeof in.head);
  in.receiving = true;
  in.received = 0;
  in.target = take_match(source, in.head.tag);
  if (in.target) {
    require_match(source, *in.target, in.head);
  } else {
    in.other = {in.head, std::vector<std::byte>(static_cast<size_t>(in.head.bytes))};
  }
  return true;
}

void SharedMemoryMessages::end_message(int source) {
  Incoming& in = incoming_[static_cast<size_t>(source)];
  in.receiving = false;
  if (in.target) {
    std::exchange(in.target, nullptr)->finish();
    return;
  }
  in.held.push_back(std::move(in.other));
  // A receive may have been posted for it in the meantime.
  const auto waiting = std::find_if(in.posted.begin(), in.posted.end(),
                                    [&](const Message& message) { return message->head().tag == in.head.tag; });
  if (waiting != in.posted.end()) serve_from_held(source, Message(*waiting));
}

void SharedMemoryMessages::serve_from_held(int source, const Message& message) {
  Incoming& in = incoming_[static_cast<size_t>(source)];
  const auto found = std::find_if(in.held.begin(), in.held.end(),
                                  [&](const Held& held) { return held.head.tag == message->head().tag; });
  if (found == in.held.end()) return;
  require_match(source, *message, found->head);
  if (!found->data.empty()) std::memcpy(message->data(), found->data.data(), found->data.size());
  in.held.erase(found);
  in.posted.remove(message);
  message->finish();
}

void SharedMemoryMessages::require_match(int source, const SharedMemoryMessage& message,
                                         const MessageHead& head) const {
  require<CommError>(message.head().bytes == head.bytes && message.head().dtype == head.dtype, peers_.group(), " rank ",
                     rank_, ": ", message, ": rank ", source, " sends ", head,
                     "; both sides must name the same dtype and number of elements");
}

SharedMemoryMessages::Message SharedMemoryMessages::take_match(int source, int32_t tag) {
  auto& posted = incoming_[static_cast<size_t>(source)].posted;
  const auto found =
      std::find_if(posted.begin(), posted.end(), [&](const Message& message) { return message->head().tag == tag; });
  if (found == posted.end()) return nullptr;
  Message message = *found;
  posted.erase(found);
  return message;
}

void SharedMemoryMessages::check_hope() const {
  const auto check = [&](const SharedMemoryMessage& message) {
    peers_.require_hope(message.peer(), message);
    require<CommError>(Clock::now() < message.deadline(), peers_.group(), " rank ", rank_, ": ", message,
                       " timed out after ", static_cast<double>(peers_.timeout().count()) / 1000.0, " s; waiting for ",
                       lazy([&] { return peers_.describe(message.peer()); }));
  };
  for (const Outgoing& out : outgoing_) {
    for (const Message& message : out.queue) check(*message);
  }
  for (const Incoming& in : incoming_) {
    if (in.target) check(*in.target);
    for (const Message& message : in.posted) check(*message);
  }
}

void SharedMemoryMessages::fail_all(const std::exception_ptr& error) {
  std::deque<std::pair<bool, Message>> posted;
  {
    const std::lock_guard lock(mutex_);
    failure_ = error;  // nothing is posted from now on
    posted.swap(inbox_);
  }
  for (auto& [is_send, message] : posted) message->finish(error);
  for (Outgoing& out : outgoing_) {
    for (const Message& message : out.queue) message->finish(error);
    out.queue.clear();
  }
  for (Incoming& in : incoming_) {
    if (in.target) std::exchange(in.target, nullptr)->finish(error);
    for (const Message& message : in.posted) message->finish(error);
    in.posted.clear();
  }
}

size_t SharedMemoryMessages::write_ring(int destination, const std::byte* data, size_t bytes) {
  RingEnds& ends = memory_.ring_ends(rank_, destination);
  std::byte* const ring = memory_.ring(rank_, destination);
  const size_t capacity = memory_.ring_bytes();
  const uint64_t written = ends.written.load(std::memory_order_relaxed);
  const size_t room = capacity - static_cast<size_t>(written - ends.read.load(std::memory_order_acquire));
  const size_t count = std::min(bytes, room);
  const size_t at = written % capacity;
  const size_t first = std::min(count, capacity - at);
  if (first > 0) std::memcpy(ring + at, data, first);
  if (count > first) std::memcpy(ring, data + first, count - first);
  ends.written.store(written + count, std::memory_order_release);
  return count;
}

size_t SharedMemoryMessages::read_ring(int source, std::byte* data, size_t bytes) {
  RingEnds& ends = memory_.ring_ends(source, rank_);
  const std::byte* const ring = memory_.ring(source, rank_);
  const size_t capacity = memory_.ring_bytes();
  const uint64_t read = ends.read.load(std::memory_order_relaxed);
  const auto available = static_cast<size_t>(ends.written.load(std::memory_order_acquire) - read);
  const size_t count = std::min(bytes, available);
  const size_t at = read % capacity;
  const size_t first = std::min(count, capacity - at);
  if (first > 0) std::memcpy(data, ring + at, first);
  if (count > first) std::memcpy(data + first, ring, count - first);
  ends.read.store(read + count, std::memory_order_release);
  return count;
}

}  // namespace ds::comm
