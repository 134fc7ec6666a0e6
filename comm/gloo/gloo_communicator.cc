#include "comm/gloo/gloo_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <functional>
#include <optional>

#include "comm/collective.h"
#include "comm/gloo/gloo_exchange.h"
#include "comm/gloo/gloo_wire.h"
#include "comm/local_reduce.h"
#include "comm/operation_name.h"
#include "comm/self_messages.h"
#include "core/check.h"
#include "core/making_process.h"
#include "core/task_queue.h"

namespace ds::comm {
namespace {

std::byte* start_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::byte*>(tensor.data_ptr()) : nullptr;
}

// The tensor itself on the CPU, a copy of it in host memory elsewhere (waits for the current stream).
at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() ? tensor.to(at::kCPU) : tensor;
}

at::Tensor host_space_for(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
}

// Tells operations apart on the wire: ranks that issue different ones never take each other's bytes for their own.
int tag_of(const Collective& collective, uint64_t sequence) {
  uint64_t hash = sequence * 0x9e3779b97f4a7c15ULL + static_cast<uint64_t>(collective.kind);
  const bool whole = collective.kind != CollectiveKind::kAllToAll && collective.kind != CollectiveKind::kBarrier;
  const at::Tensor& tensor = collective.kind == CollectiveKind::kGather ? collective.input : collective.output;
  if (whole && tensor.defined()) {
    hash = hash * 31 + tensor.nbytes();
    hash = hash * 31 + static_cast<uint64_t>(tensor.scalar_type());
  }
  hash = (hash * 31 + static_cast<uint64_t>(collective.op)) * 31 + static_cast<uint64_t>(collective.peer);
  for (const char c : collective.label) hash = hash * 31 + static_cast<unsigned char>(c);
  hash ^= hash >> 29;
  return static_cast<int>(hash & ((1U << 29) - 1));
}

// A message that is received with another length than it was sent with would end the process inside gloo: with the
// length in the tag the two never meet, and the time limit names them.
int message_tag(int tag, int64_t bytes) {
  const uint64_t hash = static_cast<uint64_t>(bytes) * 0x9e3779b97f4a7c15ULL;
  return static_cast<int>((hash >> 50) << 16) | tag;
}

// A collective on the communicator's thread. Holds the tensors until it is done.
class GlooCollectiveWork : public WorkState {
 public:
  GlooCollectiveWork(std::shared_ptr<TaskQueue::Task> task, at::Tensor device_output, at::Tensor host_output)
      : task_(std::move(task)), device_output_(std::move(device_output)), host_output_(std::move(host_output)) {}

  bool is_completed() override { return task_->done(); }

  void wait() override {
    task_->wait();
    if (device_output_.defined()) {
      const at::NoGradGuard no_grad;
      device_output_.copy_(host_output_);
      device_output_.reset();
    }
  }

 private:
  std::shared_ptr<TaskQueue::Task> task_;
  at::Tensor device_output_;  // undefined on the CPU, and once copied
  at::Tensor host_output_;
};

// A send or a receive. gloo cannot be asked whether it has finished, so the first is_completed() starts a thread that
// waits for it.
class GlooMessageWork : public WorkState {
 public:
  GlooMessageWork(std::shared_ptr<GlooWire> wire, std::optional<GlooWire::Message> message, OperationName name,
                  at::Tensor device_output, at::Tensor host)
      : wire_(std::move(wire)),
        message_(std::move(message)),
        name_(std::move(name)),
        device_output_(std::move(device_output)),
        host_(std::move(host)) {}

  bool is_completed() override {
    if (!watcher_) {
      watcher_ = make_owned_where_made<TaskQueue>();
      watched_ = watcher_->push([this] { complete(); });
    }
    return watched_->done();
  }

  void wait() override {
    if (watched_) {
      watched_->wait();
    } else {
      complete();
    }
    if (device_output_.defined()) {
      const at::NoGradGuard no_grad;
      device_output_.copy_(host_);
      device_output_.reset();
    }
  }

 private:
  void complete() {
    if (message_) wire_->complete(*message_, name_);
    message_.reset();
  }

  std::shared_ptr<GlooWire> wire_;
  std::optional<GlooWire::Message> message_;
  OperationName name_;
  at::Tensor device_output_;
  at::Tensor host_;
  std::shared_ptr<TaskQueue::Task> watched_;
  OwnedWhereMade<TaskQueue> watcher_;  // last: its thread ends before the rest goes
};

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(const GlooGroup& group)
      : Communicator(group.rank, group.size, group.name),
        group_(group),
        wire_(std::make_shared<GlooWire>(
            group, group.size == 1 ? nullptr : connect_gloo(group.store, group.rank, group.size, group.options))),
        exchange_(*wire_) {}

 protected:
  Work launch(Collective collective) override;
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) override;

 private:
  Work launch_message(const Collective& collective);
  void run(const Collective& collective, int tag);
  void exchange(const Collective& collective);

  GlooGroup group_;
  std::shared_ptr<GlooWire> wire_;
  GlooExchange exchange_;
  SelfMessages self_;
  uint64_t sequence_ = 0;
  int groups_made_ = 0;
  TaskQueue queue_;  // last: its thread ends before the rest goes
};

std::shared_ptr<Communicator> GlooCommunicator::make_group(const std::vector<int>& ranks, const std::string& name) {
  const std::string prefix = cat(name, "#", groups_made_++);
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  require(std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) && !ranks.empty() && ranks.front() >= 0 &&
              ranks.back() < size(),
          "new_group '", name, "': expected ascending ranks of group '", this->name(), "' in [0, ", size(), ")");
  if (own == ranks.end()) return nullptr;
  GlooGroup sub = group_;
  sub.store = c10::make_intrusive<c10d::PrefixStore>(cat(prefix, "/", ranks.front()), group_.store);
  sub.rank = static_cast<int>(own - ranks.begin());
  sub.size = static_cast<int>(ranks.size());
  sub.name = name;
  sub.peers.clear();
  for (const int r : ranks) sub.peers.push_back(group_.peers.empty() ? std::string() : group_.peers[r]);
  return make_gloo_communicator(sub);
}

Work GlooCommunicator::launch(Collective collective) {
  if (collective.kind == CollectiveKind::kSend || collective.kind == CollectiveKind::kRecv) {
    return launch_message(collective);
  }
  const bool reduces = collective.kind == CollectiveKind::kAllReduce || collective.kind == CollectiveKind::kReduce ||
                       collective.kind == CollectiveKind::kReduceScatter;
  if (reduces)
    require_reducible(collective.input.scalar_type(), collective.op, lazy([&] { return OperationName(collective); }));
  at::Tensor device_output;
  const bool same = collective.input.is_same(collective.output);
  if (collective.output.defined() && !collective.output.is_cpu()) device_output = collective.output;
  collective.input = on_host(collective.input);
  collective.output = same ? collective.input : host_space_for(collective.output);
  const at::Tensor host_output = collective.output;
  const int tag = tag_of(collective, sequence_++);
  auto task = queue_.push([this, work = std::move(collective), tag] {
    run(work, tag);
    tell_end(work.timers);
  });
  return Work(std::make_shared<GlooCollectiveWork>(std::move(task), std::move(device_output), host_output));
}

Work GlooCommunicator::launch_message(const Collective& collective) {
  const bool sending = collective.kind == CollectiveKind::kSend;
  OperationName name(collective);
  require(collective.tag >= 0 && collective.tag < (1 << 16), name, ": expected a tag in [0, 65536), found ",
          collective.tag);
  if (collective.peer == rank()) {
    return sending ? self_.send(collective.input, collective.tag)
                   : self_.recv(collective.output, collective.tag, std::move(name));
  }
  const at::Tensor host = sending ? on_host(collective.input) : host_space_for(collective.output);
  const at::Tensor device_output = !sending && !collective.output.is_cpu() ? collective.output : at::Tensor();
  const auto bytes = static_cast<int64_t>(host.nbytes());
  std::optional<GlooWire::Message> message;
  if (bytes > 0) {
    const int tag = message_tag(collective.tag, bytes);
    message = sending ? wire_->post_send(host.data_ptr(), bytes, collective.peer, tag, name)
                      : wire_->post_recv(host.data_ptr(), bytes, collective.peer, tag, name);
  }
  return Work(std::make_shared<GlooMessageWork>(wire_, std::move(message), std::move(name), device_output, host));
}

void GlooCommunicator::run(const Collective& collective, int tag) {
  try {
    exchange_.begin(OperationName(collective), tag);
    exchange(collective);
  } catch (const CommError& error) {
    exchange_.abandon();
    wire_->close(error.what());
    throw;
  } catch (...) {
    exchange_.abandon();
    throw;
  }
}

void GlooCommunicator::exchange(const Collective& c) {
  std::byte* const in = start_of(c.input);
  std::byte* const out = start_of(c.output);
  const auto in_bytes = c.input.defined() ? static_cast<int64_t>(c.input.nbytes()) : 0;
  const auto out_bytes = c.output.defined() ? static_cast<int64_t>(c.output.nbytes()) : 0;
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
      return exchange_.all_reduce(out, c.output.numel(), c.output.scalar_type(), c.op);
    case CollectiveKind::kReduce:
      return exchange_.reduce(out, c.output.numel(), c.output.scalar_type(), c.op, c.peer);
    case CollectiveKind::kReduceScatter:
      return exchange_.reduce_scatter(out, in, c.output.numel(), c.output.scalar_type(), c.op);
    case CollectiveKind::kAllGather:
      return exchange_.all_gather(out, in, in_bytes);
    case CollectiveKind::kGather:
      return exchange_.gather(out, in, in_bytes, c.peer);
    case CollectiveKind::kScatter:
      return exchange_.scatter(out, in, out_bytes, c.peer);
    case CollectiveKind::kBroadcast:
      return exchange_.broadcast(out, out_bytes, c.peer);
    case CollectiveKind::kAllToAll:
      return exchange_.all_to_all(out, in, split_bytes(c.output, c.output_splits, size()),
                                  split_bytes(c.input, c.input_splits, size()));
    case CollectiveKind::kBarrier:
      return exchange_.barrier();
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      break;
  }
  ensure(false, "messages do not pass through the queue");
}

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(const GlooGroup& group) {
  return make_shared_where_made<GlooCommunicator>(group);
}

}  // namespace ds::comm
