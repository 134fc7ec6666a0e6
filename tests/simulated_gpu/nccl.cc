#include "tests/simulated_gpu/nccl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/gloo/gloo_backend.h"
#include "core/check.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/tensors.h"

namespace ds::simulated_gpu {
namespace {

// A stream whose tasks run by themselves, in order: the other ranks wait for them.
class Lane {
 public:
  explicit Lane(c10::Device device) : stream_(next_stream(device)), thread_([this] { work(); }) {}

  ~Lane() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // What has not begun is not done any more, and what is under way may fail.
  void drop() { *dropped_ = true; }

  // After what the current stream of the device was given.
  Point give(c10::Device device, const std::string& name, const std::vector<Access>& accesses,
             std::function<void()> run) {
    Timeline& timeline = Timeline::instance();
    timeline.block(stream_, timeline.now(current_number(device)));
    Point point = timeline.enqueue(stream_, name, accesses, [name, run = std::move(run), dropped = dropped_] {
      if (*dropped) return;
      const at::NoGradGuard no_grad;
      try {
        run();
      } catch (const std::exception& error) {
        if (*dropped) return;
        std::fprintf(stderr, "simulated NCCL: %s: %s\n", name.c_str(), error.what());
        std::_Exit(6);
      }
    });
    {
      const std::lock_guard lock(mutex_);
      points_.push_back(point);
    }
    changed_.notify_all();
    return point;
  }

 private:
  static size_t next_stream(c10::Device device) {
    static std::atomic<int64_t> next{1000};
    return Timeline::instance().stream(device.index(), next++);
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ended_ || !points_.empty(); });
      if (points_.empty()) return;
      const Point point = std::move(points_.front());
      points_.pop_front();
      lock.unlock();
      try {
        Timeline::instance().run_until(point);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "simulated NCCL: what it waits for failed: %s\n", error.what());
        std::_Exit(6);
      }
      lock.lock();
    }
  }

  size_t stream_;
  std::shared_ptr<std::atomic<bool>> dropped_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Point> points_;
  bool ended_ = false;
  std::thread thread_;
};

class LaneWork : public c10d::Work {
 public:
  LaneWork(Point point, c10::Device device, std::vector<at::Tensor> held, std::vector<at::Tensor> outputs)
      : point_(std::move(point)), device_(device), held_(std::move(held)), outputs_(std::move(outputs)) {}

  bool isCompleted() override {
    ask_about(device_);
    return Timeline::instance().reached(point_);
  }
  bool isSuccess() const override { return Timeline::instance().reached(point_); }
  void synchronize() override {
    Timeline::instance().block(current_number(device_), point_);
    held_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

 private:
  Point point_;
  c10::Device device_;
  std::vector<at::Tensor> held_;     // LibTorch holds tensors until somebody has waited
  std::vector<at::Tensor> outputs_;  // and what is written as long as there is the Work
};

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

at::Tensor reduced(const at::Tensor& parts, c10d::ReduceOp::RedOpType op) {
  at::Tensor result = parts[0].clone();
  for (int64_t r = 1; r < parts.size(0); ++r) {
    switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        result.add_(parts[r]);
        break;
      case c10d::ReduceOp::PRODUCT:
        result.mul_(parts[r]);
        break;
      case c10d::ReduceOp::MIN:
        result = result.minimum(parts[r]);
        break;
      case c10d::ReduceOp::MAX:
        result = result.maximum(parts[r]);
        break;
      default:
        throw Error("NCCL has no such reduction");
    }
  }
  return op == c10d::ReduceOp::AVG ? result.div_(parts.size(0)) : result;
}

constexpr std::chrono::seconds kWatchdog{2};  // NCCL's looks from time to time only

class SimulatedNccl : public c10d::Backend {
 public:
  SimulatedNccl(c10::intrusive_ptr<c10d::Store> store, NcclPlace place, c10::Device device,
                std::chrono::milliseconds timeout)
      : c10d::Backend(place.rank, place.size),
        store_(std::move(store)),
        eager_(place.eager),
        device_(device),
        timeout_(timeout) {
    if (eager_) way_of_all();
  }

  ~SimulatedNccl() override {
    if (!shut_down_) drop();
  }

  const std::string getBackendName() const override { return "simulated nccl"; }
  void shutdown() override {
    shut_down_ = true;
    ways_.clear();  // they end when they have done what they were given
  }
  void abort() override { drop(); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_to(tensors[0], tensors[0], 0, tensors[0].numel(), options.reduceOp, "all_reduce");
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const int64_t count = options.rootRank == rank_ ? tensors[0].numel() : 0;
    return reduce_to(tensors[0], tensors[0], 0, count, options.reduceOp, "reduce");
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return reduce_to(output, input, rank_ * output.numel(), output.numel(), options.reduceOp, "reduce_scatter");
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return on_group("all_gather", {output}, {input},
                    [this, to = on_cpu(output), from = on_cpu(input)] { to.view(-1).copy_(all(from).view(-1)); });
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return on_group("broadcast", tensors, {}, [this, tensor = on_cpu(tensors[0]), options] {
      Tensors list{tensor};
      carry([&] { return way_of_all().gloo->broadcast(list, options); });
    });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Tensors to = outputs.empty() ? Tensors() : outputs[0];
    return on_group("gather", to, inputs, [this, to = aliases(to), from = on_cpu(inputs[0])] {
      const at::Tensor parts = all(from);
      for (size_t r = 0; r < to.size(); ++r) to[r].view(-1).copy_(parts[static_cast<int64_t>(r)].view(-1));
    });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const Tensors from = inputs.empty() ? Tensors() : inputs[0];
    return on_group("scatter", outputs, from, [this, to = on_cpu(outputs[0]), from = aliases(from), options] {
      Tensors to_list{to};
      std::vector<Tensors> from_list;
      if (!from.empty()) from_list.push_back(from);
      carry([&] { return way_of_all().gloo->scatter(to_list, from_list, options); });
    });
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& from, std::vector<int64_t>& to,
                            const c10d::AllToAllOptions&) override {
    return on_group("all_to_all", {output}, {input},
                    [this, out = on_cpu(output), in = on_cpu(input), from, to]() mutable {
                      carry([&] { return way_of_all().gloo->alltoall_base(out, in, from, to); });
                    });
  }
  WorkPointer send(Tensors& tensors, int peer, int) override {
    Way& way = way_to(peer);
    return on_lane(*way.lane, "send", {}, tensors, [ends = ends_of(way, peer), tensor = on_cpu(tensors[0])] {
      Tensors ready{at::empty({1}, at::kByte)};
      carry([&] { return ends.gloo->recv(ready, ends.peer, kReady); });
      Tensors list{tensor};
      carry([&] { return ends.gloo->send(list, ends.peer, kMessage); });
    });
  }
  WorkPointer recv(Tensors& tensors, int peer, int) override {
    Way& way = way_to(peer);
    return on_lane(*way.lane, "recv", tensors, {}, [ends = ends_of(way, peer), tensor = on_cpu(tensors[0])] {
      Tensors ready{at::zeros({1}, at::kByte)};
      carry([&] { return ends.gloo->send(ready, ends.peer, kReady); });
      Tensors list{tensor};
      carry([&] { return ends.gloo->recv(list, ends.peer, kMessage); });
    });
  }

 private:
  enum Tag : int { kMessage, kReady };
  // A communicator of NCCL with its stream.
  struct Way {
    c10::intrusive_ptr<c10d::Backend> gloo;  // for longer than the lane, whose tasks use it
    std::unique_ptr<Lane> lane;              // none where the ranks did not meet
  };
  // Of a message.
  struct Ends {
    c10::intrusive_ptr<c10d::Backend> gloo;
    int peer;  // there
  };

  void drop() {
    for (const auto& [name, way] : ways_) {
      if (way.lane) way.lane->drop();
    }
  }

  static Tensors aliases(const Tensors& tensors) {
    Tensors made;
    for (const at::Tensor& tensor : tensors) made.push_back(on_cpu(tensor));
    return made;
  }

  // c10d's flight recorder, which all groups of a process share, enters new groups without a lock.
  static void carry(const std::function<WorkPointer()>& issue) {
    static std::mutex recorder;
    std::unique_lock lock(recorder);
    const WorkPointer work = issue();
    lock.unlock();
    work->wait();
  }

  // {size, ...}: the tensors of all ranks.
  at::Tensor all(const at::Tensor& own) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), size_);
    at::Tensor parts = at::empty(sizes, own.options());
    at::Tensor to = parts.view(-1).view(at::kByte);
    at::Tensor from = own.contiguous().view(-1).view(at::kByte);
    carry([&] { return way_of_all().gloo->_allgather_base(to, from); });
    return parts;
  }

  // The reduction's elements from `begin` on.
  WorkPointer reduce_to(const at::Tensor& output, const at::Tensor& input, int64_t begin, int64_t count,
                        const c10d::ReduceOp& op, const char* name) {
    return on_group(name, {output}, {input},
                    [this, to = on_cpu(output), from = on_cpu(input), begin, count, op = op.op_] {
                      const at::Tensor result = reduced(all(from), op).view(-1);
                      if (count > 0) to.view(-1).copy_(result.narrow(0, begin, count));
                    });
  }

  WorkPointer on_group(const char* name, const Tensors& written, const Tensors& read, std::function<void()> run) {
    return on_lane(*way_of_all().lane, name, written, read, std::move(run));
  }

  WorkPointer on_lane(Lane& lane, const char* name, const Tensors& written, const Tensors& read,
                      std::function<void()> run) {
    std::vector<Access> accesses;
    Tensors held;
    for (const bool write : {false, true}) {
      for (const at::Tensor& tensor : write ? written : read) {
        accesses.push_back(access_of(tensor, write));
        held.push_back(tensor);
      }
    }
    return c10::make_intrusive<LaneWork>(lane.give(device_, name, accesses, std::move(run)), device_, std::move(held),
                                         written);
  }

  Way& way_of_all() { return way("all", rank_, size_); }
  Way& way_to(int peer) {
    if (eager_) return way_of_all();
    return way(cat(std::min(rank_, peer), "-", std::max(rank_, peer)), rank_ > peer ? 1 : 0, 2);
  }
  Ends ends_of(const Way& way, int peer) const { return {way.gloo, eager_ ? peer : rank_ > peer ? 0 : 1}; }

  // Called by lanes too, for a way that is there by then.
  Way& way(const std::string& name, int rank, int ranks) {
    const std::lock_guard lock(mutex_);
    Way& way = ways_[name];
    if (!way.lane) {
      const std::string count = cat("simulated nccl/", name);
      if (store_->add(count, 1) == ranks) store_->set(cat(count, "/met"), "1");
      store_->wait({cat(count, "/met")}, timeout_);
      way.gloo = comm::connect_gloo(c10::make_intrusive<c10d::PrefixStore>(count, store_), rank, ranks,
                                    {.timeout = timeout_ + kWatchdog, .address = "127.0.0.1"});
      way.lane = std::make_unique<Lane>(device_);
    }
    return way;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  bool eager_;
  c10::Device device_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<std::string, Way> ways_;
  bool shut_down_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, NcclPlace place,
                                               c10::Device device, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SimulatedNccl>(store, place, device, timeout);
}

}  // namespace ds::simulated_gpu
