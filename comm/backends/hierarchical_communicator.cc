#include "comm/backends/hierarchical_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <functional>
#include <mutex>

#include "comm/gloo/gloo_communicator.h"
#include "comm/local_reduce.h"
#include "comm/queued_work.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "core/check.h"
#include "core/making_process.h"
#include "core/task_queue.h"

namespace ds::comm {
namespace {

struct Position {
  int host = 0;
  int local = 0;
};

std::vector<Position> positions_of(const std::vector<std::vector<int>>& hosts, int size) {
  std::vector<Position> positions(static_cast<size_t>(size), Position{-1, -1});
  for (int h = 0; h < static_cast<int>(hosts.size()); ++h) {
    for (int l = 0; l < static_cast<int>(hosts[h].size()); ++l) positions.at(hosts[h][l]) = {h, l};
  }
  for (const Position& position : positions) require(position.host >= 0, "hosts: every rank must be on one of them");
  return positions;
}

c10::intrusive_ptr<c10d::Store> prefixed(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

class HierarchicalCommunicator : public Communicator {
 public:
  explicit HierarchicalCommunicator(const PlacedGroup& group);

 protected:
  Work launch(Collective collective) override;
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) override;

 private:
  using Issue = std::function<Work()>;

  void join_levels();
  Work launch_message(const Collective& collective);
  // Issues and waits. The parts of this communicator are used by its queue and its owner: issuing is under a lock.
  void complete(const Issue& issue);
  void complete_all(const std::vector<Issue>& issues);

  void require_usable() const;  // under the lock
  void fail(const std::string& reason);

  void run(const Collective& c);
  void run_flat(const Collective& c);
  bool gains(const Collective& c) const;
  void all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& label);
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const std::string& label);
  void all_gather(const at::Tensor& output, const at::Tensor& input, const std::string& label);
  void broadcast(const at::Tensor& tensor, int root, const std::string& label);
  void reduce(const at::Tensor& tensor, int root, ReduceOp op, const std::string& label);

  PlacedGroup group_;
  std::vector<Position> positions_;
  bool even_ = false;
  bool in_host_order_ = false;           // rank = host * L + local
  std::shared_ptr<Communicator> inner_;  // this host; null where not even
  std::shared_ptr<Communicator> outer_;  // the ranks of this position on all hosts; null where not even
  std::shared_ptr<Communicator> flat_;
  std::mutex issuing_;
  std::string failure_;  // empty: none
  int groups_made_ = 0;
  TaskQueue queue_;  // last: its thread ends before the rest goes
};

HierarchicalCommunicator::HierarchicalCommunicator(const PlacedGroup& group)
    : Communicator(group.rank, group.size, group.name),
      group_(group),
      positions_(positions_of(group.hosts, group.size)),
      even_(is_even(group.hosts)),
      in_host_order_(even_) {
  for (int r = 0; r < size() && even_; ++r) {
    const int local_size = static_cast<int>(group_.hosts[0].size());
    in_host_order_ = in_host_order_ && positions_[r].host * local_size + positions_[r].local == r;
  }
  // With levels, most pairs of ranks never talk to each other directly: they connect when they do.
  flat_ = make_gloo_communicator({.store = prefixed("flat", group_.store),
                                  .rank = rank(),
                                  .size = size(),
                                  .name = name(),
                                  .options = {.timeout = group_.timeout, .address = group_.address, .lazy = even_},
                                  .peers = group_.peers});
  if (even_) join_levels();
}

void HierarchicalCommunicator::join_levels() {
  const Position own = positions_[rank()];
  const auto& host = group_.hosts[own.host];
  inner_ = make_shared_memory_communicator({.store = prefixed(cat("inner/", own.host), group_.store),
                                            .rank = own.local,
                                            .size = static_cast<int>(host.size()),
                                            .name = cat(name(), ".host", own.host),
                                            .timeout = group_.timeout});
  GlooGroup line{.store = prefixed(cat("outer/", own.local), group_.store),
                 .rank = own.host,
                 .size = static_cast<int>(group_.hosts.size()),
                 .name = cat(name(), ".line", own.local),
                 .options = {.timeout = group_.timeout, .address = group_.address}};
  for (const auto& ranks : group_.hosts) {
    line.peers.push_back(cat("rank ", ranks[own.local], " of ", name(),
                             group_.peers.empty() ? "" : cat(", ", group_.peers[ranks[own.local]])));
  }
  outer_ = make_gloo_communicator(line);
}

std::shared_ptr<Communicator> HierarchicalCommunicator::make_group(const std::vector<int>& ranks,
                                                                   const std::string& name) {
  const std::string prefix = cat("group/", name, "#", groups_made_++, "/", ranks.empty() ? -1 : ranks.front());
  require(!ranks.empty() && std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) && ranks.front() >= 0 &&
              ranks.back() < size(),
          "new_group '", name, "': expected ascending ranks of group '", this->name(), "' in [0, ", size(), ")");
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return nullptr;
  PlacedGroup sub{.store = prefixed(prefix, group_.store),
                  .rank = static_cast<int>(own - ranks.begin()),
                  .size = static_cast<int>(ranks.size()),
                  .name = name,
                  .address = group_.address,
                  .timeout = group_.timeout};
  for (const auto& host : group_.hosts) {
    std::vector<int> members;
    for (int r = 0; r < sub.size; ++r) {
      if (std::binary_search(host.begin(), host.end(), ranks[r])) members.push_back(r);
    }
    if (!members.empty()) sub.hosts.push_back(std::move(members));
  }
  for (const int r : ranks) sub.peers.push_back(group_.peers.empty() ? std::string() : group_.peers[r]);
  return make_placed_communicator(sub);
}

Work HierarchicalCommunicator::launch(Collective collective) {
  const auto kind = collective.kind;
  if (kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv) return launch_message(collective);
  if (kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce || kind == CollectiveKind::kReduceScatter) {
    require_reducible(collective.input.scalar_type(), collective.op,
                      lazy([&] { return cat(name_of(kind), " '", collective.label, "'"); }));
  }
  auto task = queue_.push([this, work = std::move(collective)] {
    const at::NoGradGuard no_grad;
    try {
      run(work);
      tell_end(work.timers);
    } catch (const CommError& error) {
      fail(error.what());
      throw;
    }
  });
  return Work(std::make_shared<QueuedWork>(std::move(task)));
}

Work HierarchicalCommunicator::launch_message(const Collective& c) {
  const bool near = even_ && positions_[c.peer].host == positions_[rank()].host;
  const int peer = near ? positions_[c.peer].local : c.peer;
  const std::lock_guard lock(issuing_);
  require_usable();
  Communicator& way = near ? *inner_ : *flat_;
  return c.kind == CollectiveKind::kSend ? way.isend(c.input, peer, c.tag, c.label)
                                         : way.irecv(c.output, peer, c.tag, c.label);
}

void HierarchicalCommunicator::complete(const Issue& issue) { complete_all({issue}); }

void HierarchicalCommunicator::complete_all(const std::vector<Issue>& issues) {
  std::vector<Work> works;
  {
    const std::lock_guard lock(issuing_);
    require_usable();
    for (const Issue& issue : issues) works.push_back(issue());
  }
  for (const Work& work : works) work.wait();
}

void HierarchicalCommunicator::require_usable() const {
  require<CommError>(failure_.empty(), "group '", name(), "', rank ", rank(),
                     ": unusable since an earlier operation failed: ", failure_);
}

// Leaves all parts, so that ranks that wait for this one in another part learn of it.
void HierarchicalCommunicator::fail(const std::string& reason) {
  const std::lock_guard lock(issuing_);
  if (failure_.empty()) failure_ = reason;
  inner_.reset();
  outer_.reset();
  flat_.reset();
}

bool HierarchicalCommunicator::gains(const Collective& c) const {
  if (!even_) return false;
  const bool integer_average =
      c.op == ReduceOp::kAvg && c.output.defined() && !at::isFloatingType(c.output.scalar_type());
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      return !integer_average;
    case CollectiveKind::kReduceScatter:
      return !integer_average && in_host_order_;
    case CollectiveKind::kAllGather:
      return in_host_order_;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kBarrier:
      return true;
    default:
      return false;
  }
}

void HierarchicalCommunicator::run(const Collective& c) {
  {
    const std::lock_guard lock(issuing_);
    require_usable();
  }
  if (!gains(c)) return run_flat(c);
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
      return all_reduce(c.output.view(-1), c.op, c.label);
    case CollectiveKind::kReduceScatter:
      return reduce_scatter(c.output.view(-1), c.input.view(-1), c.op, c.label);
    case CollectiveKind::kAllGather:
      return all_gather(c.output.view(-1), c.input.view(-1), c.label);
    case CollectiveKind::kBroadcast:
      return broadcast(c.output, c.peer, c.label);
    case CollectiveKind::kReduce:
      return reduce(c.output, c.peer, c.op, c.label);
    case CollectiveKind::kBarrier: {
      // After the first everyone here has come, after the second everyone everywhere.
      const at::Tensor token = at::zeros({1}, at::kByte);
      return all_reduce(token, ReduceOp::kMax, c.label);
    }
    default:
      break;
  }
  ensure(false, "gains() names what run() composes");
}

void HierarchicalCommunicator::run_flat(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
      return complete([&] { return flat_->all_reduce(c.output, c.op, c.label); });
    case CollectiveKind::kReduce:
      return complete([&] { return flat_->reduce(c.output, c.peer, c.op, c.label); });
    case CollectiveKind::kReduceScatter:
      return complete([&] { return flat_->reduce_scatter(c.output, c.input, c.op, c.label); });
    case CollectiveKind::kAllGather:
      return complete([&] { return flat_->all_gather(c.output, c.input, c.label); });
    case CollectiveKind::kBroadcast:
      return complete([&] { return flat_->broadcast(c.output, c.peer, c.label); });
    case CollectiveKind::kGather:
      return complete([&] { return flat_->gather(c.output, c.input, c.peer, c.label); });
    case CollectiveKind::kScatter:
      return complete([&] { return flat_->scatter(c.output, c.input, c.peer, c.label); });
    case CollectiveKind::kAllToAll:
      return complete([&] { return flat_->all_to_all(c.output, c.input, c.output_splits, c.input_splits, c.label); });
    case CollectiveKind::kBarrier: {
      const at::Tensor token = at::zeros({1}, at::kByte);
      return complete([&] { return flat_->all_reduce(token, ReduceOp::kMax, c.label); });
    }
    default:
      ensure(false, "messages do not pass through the queue");
  }
}

// The remainder of a division by the ranks of a host goes whole through both levels.
void HierarchicalCommunicator::all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& label) {
  const int64_t slice = tensor.numel() / inner_->size();
  const int64_t body = slice * inner_->size();
  const at::Tensor even = tensor.narrow(0, 0, body);
  const at::Tensor own = tensor.narrow(0, inner_->rank() * slice, slice);
  const at::Tensor rest = tensor.narrow(0, body, tensor.numel() - body);
  const auto on_parts = [&](const Issue& on_body, const Issue& on_rest) {
    std::vector<Issue> issues;
    if (slice > 0) issues.push_back(on_body);
    if (rest.numel() > 0) issues.push_back(on_rest);
    complete_all(issues);
  };
  on_parts([&] { return inner_->reduce_scatter(own, even, op, label); },
           [&] { return inner_->all_reduce(rest, op, label); });
  on_parts([&] { return outer_->all_reduce(own, op, label); }, [&] { return outer_->all_reduce(rest, op, label); });
  if (slice > 0) complete([&] { return inner_->all_gather(even, own, label); });
}

void HierarchicalCommunicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                              const std::string& label) {
  const int64_t part = output.numel();
  const int64_t host_part = part * inner_->size();
  const at::Tensor partial = at::empty({part * outer_->size()}, output.options());
  std::vector<Issue> issues;
  for (int h = 0; h < outer_->size(); ++h) {
    issues.emplace_back([&, h] {
      return inner_->reduce_scatter(partial.narrow(0, h * part, part), input.narrow(0, h * host_part, host_part), op,
                                    label);
    });
  }
  complete_all(issues);
  complete([&] { return outer_->reduce_scatter(output, partial, op, label); });
}

void HierarchicalCommunicator::all_gather(const at::Tensor& output, const at::Tensor& input, const std::string& label) {
  const int64_t part = input.numel();
  const int64_t host_part = part * inner_->size();
  const at::Tensor line = at::empty({part * outer_->size()}, output.options());
  complete([&] { return outer_->all_gather(line, input, label); });
  std::vector<Issue> issues;
  for (int h = 0; h < outer_->size(); ++h) {
    issues.emplace_back([&, h] {
      return inner_->all_gather(output.narrow(0, h * host_part, host_part), line.narrow(0, h * part, part), label);
    });
  }
  complete_all(issues);
}

void HierarchicalCommunicator::broadcast(const at::Tensor& tensor, int root, const std::string& label) {
  const Position from = positions_[root];
  if (inner_->rank() == from.local) complete([&] { return outer_->broadcast(tensor, from.host, label); });
  complete([&] { return inner_->broadcast(tensor, from.local, label); });
}

void HierarchicalCommunicator::reduce(const at::Tensor& tensor, int root, ReduceOp op, const std::string& label) {
  const Position to = positions_[root];
  complete([&] { return inner_->reduce(tensor, to.local, op, label); });
  if (inner_->rank() == to.local) complete([&] { return outer_->reduce(tensor, to.host, op, label); });
}

}  // namespace

bool is_even(const std::vector<std::vector<int>>& hosts) {
  return !hosts.empty() && hosts[0].size() >= 2 &&
         std::all_of(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks.size() == hosts[0].size(); });
}

std::shared_ptr<Communicator> make_placed_communicator(const PlacedGroup& group) {
  if (group.size > 1 && group.hosts.size() == 1) {
    return make_shared_memory_communicator(
        {.store = group.store, .rank = group.rank, .size = group.size, .name = group.name, .timeout = group.timeout});
  }
  if (group.size == 1) return make_gloo_communicator({.store = group.store, .name = group.name});
  return make_shared_where_made<HierarchicalCommunicator>(group);
}

}  // namespace ds::comm
