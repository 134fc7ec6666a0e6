#include "comm/gloo/gloo_wire.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "core/check.h"

namespace ds::comm {
namespace {

// The part of a c10 or gloo message that a reader can use: its first line, without gloo's source location.
std::string first_line(const std::string& text) {
  std::string line = text.substr(0, text.find('\n'));
  if (line.starts_with('[')) {
    const auto end = line.find("] ");
    if (end != std::string::npos) line.erase(0, end + 2);
  }
  return line;
}

// An entry of Note [The first loss].
struct Loss {
  int by = 0;
  int lost = 0;
};

std::vector<uint8_t> encoded(const Loss& loss) {
  std::vector<uint8_t> bytes(sizeof loss);
  std::memcpy(bytes.data(), &loss, sizeof loss);
  return bytes;
}

Loss loss_of(const std::vector<uint8_t>& bytes) {
  Loss loss;
  std::memcpy(&loss, bytes.data(), sizeof loss);
  return loss;
}

}  // namespace

GlooWire::GlooWire(const GlooGroup& group, c10::intrusive_ptr<c10d::Backend> backend)
    : store_(group.store),
      backend_(std::move(backend)),
      group_(group.name),
      peers_(group.peers),
      timeout_(group.options.timeout),
      rank_(group.rank),
      size_(group.size) {}

GlooWire::Message GlooWire::post_send(const void* data, int64_t bytes, int peer, int tag, const Printable& what) {
  return post(const_cast<void*>(data), bytes, peer, tag, true, what);  // NOLINT: at::from_blob takes no const
}

GlooWire::Message GlooWire::post_recv(void* data, int64_t bytes, int peer, int tag, const Printable& what) {
  return post(data, bytes, peer, tag, false, what);
}

GlooWire::Message GlooWire::post(void* data, int64_t bytes, int peer, int tag, bool sending, const Printable& what) {
  std::vector<at::Tensor> view{at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte))};
  std::lock_guard lock(mutex_);
  require<CommError>(backend_ != nullptr, closed_because_);
  try {
    return {sending ? backend_->send(view, peer, tag) : backend_->recv(view, peer, tag), peer, sending};
  } catch (const std::exception& error) {
    throw CommError(cat(what, " on group '", group_, "': rank ", rank_, " has no connection to ", describe_peer(peer),
                        " (", first_line(error.what()), "). That rank has most likely ended: look at its log first.",
                        report_loss(peer)));
  }
}

void GlooWire::complete(const Message& message, const Printable& what) {
  try {
    message.work->wait(timeout_);
  } catch (const std::exception& error) {
    const std::string cause = first_line(error.what());
    const bool late = cause.find("imed out") != std::string::npos;
    throw CommError(cat(what, " on group '", group_, "': rank ", rank_, " was ",
                        message.sending ? "sending to " : "waiting for ", describe_peer(message.peer),
                        late ? cat(", and nothing came for ", timeout_.count(), " ms") : "", " (gloo: ", cause, "). ",
                        late
                            ? "Either that rank is stuck or slow, or it issued another operation (other order, size or "
                              "data type): compare what both ranks did last, or raise the communication time limit."
                            : "That rank, or one it depends on, has most likely ended: look at its log first.",
                        report_loss(message.peer)));
  }
}

std::string GlooWire::report_loss(int peer) {
  try {
    const std::vector<uint8_t> first = store_->compareSet(cat("first loss of ", group_), {}, encoded({rank_, peer}));
    if (first.size() != sizeof(Loss)) return {};
    const Loss loss = loss_of(first);
    if (loss.lost == peer) return {};
    if (loss.lost == rank_) return cat(" ", describe_peer(loss.by), " had given up on this rank before.");
    return cat(" The first to go was ", describe_peer(loss.lost), ", as ", describe_peer(loss.by), " saw it.");
  } catch (const std::exception&) {
    return " The store of the rendezvous does not answer either: over env:// and tcp:// it is rank 0 that holds it.";
  }
}

void GlooWire::close(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (backend_ == nullptr) return;
  closed_because_ = cat("group '", group_, "', rank ", rank_, ": unusable since an earlier operation failed: ", reason);
  backend_.reset();
}

std::string GlooWire::describe_peer(int peer) const {
  if (static_cast<size_t>(peer) >= peers_.size() || peers_[peer].empty()) return cat("rank ", peer);
  return cat("rank ", peer, " (", peers_[peer], ")");
}

}  // namespace ds::comm
