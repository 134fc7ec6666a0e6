#include "comm/backends/c10d_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "comm/collective.h"
#include "comm/local_reduce.h"
#include "comm/operation_name.h"
#include "comm/self_messages.h"
#include "core/check.h"
#include "core/log.h"
#include "core/making_process.h"
#include "core/tensor_check.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

constexpr std::chrono::seconds kLongestEnd{30};

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().view(-1).view(at::kByte) : tensor;
}

c10d::ReduceOp c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMin:
    case ReduceOp::kBand:  // on bool
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
    case ReduceOp::kBor:  // on bool
      return c10d::ReduceOp::MAX;
    case ReduceOp::kBxor:
      break;
  }
  ensure(false, "bitwise operations are composed");
  return c10d::ReduceOp::SUM;
}

bool is_bitwise(ReduceOp op) { return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor; }

void combine_bitwise(const at::Tensor& into, const at::Tensor& next, ReduceOp op) {
  if (op == ReduceOp::kBand) {
    into.bitwise_and_(next);
  } else if (op == ReduceOp::kBor) {
    into.bitwise_or_(next);
  } else {
    into.bitwise_xor_(next);
  }
}

// The place of a rank in a group, shared with its operations.
struct Place {
  std::string text;  // for messages
  c10::Device device;
  std::shared_ptr<std::atomic<bool>> failed;
};

// An operation of the backend, and what remains to be done once it has finished.
class BackendState : public WorkState {
 public:
  BackendState(BackendWork work, std::function<void()> finish, OperationName name, std::shared_ptr<Place> place)
      : work_(std::move(work)), finish_(std::move(finish)), name_(std::move(name)), place_(std::move(place)) {}

  // The thread that watches for stalls calls it too, and has chosen no device: see TransferStream::wait_on_host.
  bool is_completed() override {
    c10::OptionalDeviceGuard guard;
    if (!place_->device.is_cpu()) guard.reset_device(place_->device);
    return work_->isCompleted();
  }

  void wait() override {
    try {
      work_->wait();
    } catch (const std::exception& error) {
      *place_->failed = true;
      throw CommError(cat(name_, place_->text, ": ", without_stack(error.what()),
                          ". A rank has most likely ended or issued another operation: look at ",
                          "the logs of the other ranks first"));
    }
    if (!finish_) return;
    const at::NoGradGuard no_grad;
    finish_();
    finish_ = nullptr;
  }

 private:
  BackendWork work_;
  std::function<void()> finish_;
  OperationName name_;
  std::shared_ptr<Place> place_;
};

class C10dCommunicator : public Communicator {
 public:
  explicit C10dCommunicator(const C10dGroup& group)
      : Communicator(group.rank, group.size, group.name),
        group_(group),
        place_(std::make_shared<Place>(cat(" on group '", group.name, "', rank ", group.rank, " of ", group.size),
                                       group.device, group.failed)),
        collectives_(group.size > 1 && group.use == GroupUse::kAll ? connect(group.store, C10dUse::kCollectives)
                                                                   : nullptr) {}
  ~C10dCommunicator() override { end(); }
  C10dCommunicator(const C10dCommunicator&) = delete;
  C10dCommunicator& operator=(const C10dCommunicator&) = delete;

 protected:
  Work launch(Collective collective) override;
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name) override {
    return make_group(ranks, name, GroupUse::kAll);
  }
  std::shared_ptr<Communicator> make_message_group(const std::vector<int>& ranks, const std::string& name) override {
    return make_group(ranks, name, GroupUse::kMessages);
  }

 private:
  // An operation of the backend, and what is left to do after it.
  struct Issued {
    BackendWork work;
    std::function<void()> finish;
  };
  using BackendPointer = c10::intrusive_ptr<c10d::Backend>;

  BackendPointer connect(const c10::intrusive_ptr<c10d::Store>& store, C10dUse use) const {
    return group_.connect(store, group_.rank, group_.size, use);
  }
  std::shared_ptr<Communicator> make_group(const std::vector<int>& ranks, const std::string& name, GroupUse use);
  c10d::Backend& messages(bool to_higher_rank);
  std::unique_lock<std::mutex> recorder_lock() const;
  void open_pair(int peer);
  BackendWork issue_message(bool sending, std::vector<at::Tensor> tensors, int peer);
  void for_each_backend(const std::function<void(c10d::Backend&)>& use) const;
  void end() noexcept;
  Issued issue(const Collective& c);
  Issued issue_reduction(const Collective& c);
  Issued issue_bitwise(const Collective& c);
  Issued issue_barrier();
  BackendWork issue_copy(const Collective& c);
  BackendWork issue_on(CollectiveKind kind, at::Tensor output, at::Tensor input, ReduceOp op, int root);
  std::vector<at::Tensor> parts_of(const at::Tensor& bytes) const;

  C10dGroup group_;
  std::shared_ptr<Place> place_;
  BackendPointer collectives_;
  BackendPointer upwards_, downwards_;  // messages to higher and to lower ranks, once there is one
  std::set<int> open_;                  // ranks that this one has exchanged a first message with
  std::vector<at::Tensor> tokens_;      // these messages, a byte each, that a device may be at
  SelfMessages self_;
  int groups_made_ = 0;
};

// Note [The end of a NCCL group]
// wait() orders streams and holds up nobody, so operations may be under way when a group ends: the last step's
// all_gather, which nobody reads any more here, and which other ranks need. ~ProcessGroupNCCL without a shutdown()
// kills them. So the device finishes what it was given first. After a failure, or while an exception flies, there may
// be nobody left to finish it with: then the group is torn down at once, which is what lets the other ranks fail too.
// The program may have caught the exception long ago, of this group or of one beside it; and where nobody was told that
// a rank is gone, there is a limit.
void C10dCommunicator::end() noexcept {
  if ((!collectives_ && !upwards_ && !downwards_) || group_.device.is_cpu()) return;
  const auto abort = [this] { for_each_backend([](c10d::Backend& backend) { backend.abort(); }); };
  try {
    if (*place_->failed || std::uncaught_exceptions() > 0) {
      abort();
      return;
    }
    const auto limit = std::min<std::chrono::milliseconds>(group_.timeout, kLongestEnd);
    // On a thread of its own, because a device cannot be waited for with a limit. abort() ends what it waits for.
    std::packaged_task<void()> wait(
        [device = group_.device] { c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index()); });
    std::future<void> done = wait.get_future();
    std::jthread waiting(std::move(wait));
    const bool in_time = done.wait_for(limit) == std::future_status::ready;
    if (!in_time) {
      log::warning("the end of a communicator", place_->text, ": operations that this rank has issued were not done ",
                   "after ", limit.count(), " ms, and are given up. A rank has most likely ended or issued another ",
                   "operation: look at the logs of the other ranks first");
      *place_->failed = true;
      abort();
    }
    done.get();
    if (in_time) for_each_backend([](c10d::Backend& backend) { backend.shutdown(); });
  } catch (const std::exception& error) {
    log::warning("the end of a communicator", place_->text, ": ", without_stack(error.what()));
  }
}

// Note [Messages on NCCL's streams]
// A backend of c10d whose communicator was made with its group gives all operations to the one stream of that
// communicator, messages too: a receive that waits for its sender holds up whatever this rank issues behind it, also
// what the sender waits for. Two ranks that both send first, or an activation that cannot leave before the next one has
// come, then stand still. c10d's answer, sends and receives between startCoalescing() and endCoalescing(), wants both
// in one place of the program, and ties a rank's neighbours to one another. So messages have backends of their own, one
// for each direction, which are not connected with the group: those make a communicator and a stream for each pair of
// ranks. What is sent in one direction between two ranks keeps its order, and waits for nothing else. Each of these
// communicators blocks its two ranks until both have come to its first message, so both directions have one, in one
// order, before the first message of either. Then these are under way on streams of the pair's own.
c10d::Backend& C10dCommunicator::messages(bool to_higher_rank) {
  BackendPointer& backend = to_higher_rank ? upwards_ : downwards_;
  if (!backend) {
    const char* const prefix = to_higher_rank ? "messages to higher ranks" : "messages to lower ranks";
    backend = connect(c10::make_intrusive<c10d::PrefixStore>(prefix, group_.store), C10dUse::kMessages);
  }
  return *backend;
}

// c10d's flight recorder, which all groups of a process share, enters new groups without a lock. (NCCL is left alone: a
// group's first operation blocks until all its ranks issue it.)
std::unique_lock<std::mutex> C10dCommunicator::recorder_lock() const {
  static std::mutex recorder;
  std::unique_lock<std::mutex> lock(recorder, std::defer_lock);
  if (group_.device.is_cpu()) lock.lock();
  return lock;
}

// On a device the current stream does not wait for the peer's tokens: what comes next between the two has its order
// from the pair's stream, and a wait here would tie all that this rank computes to how far the peer is.
void C10dCommunicator::open_pair(int peer) {
  if (open_.contains(peer)) return;
  for (const bool up : {true, false}) {
    std::vector<at::Tensor> token{at::zeros({1}, at::TensorOptions(group_.device).dtype(at::kByte))};
    c10d::Backend& backend = messages(up);
    BackendWork work;
    {
      const auto lock = recorder_lock();
      work = up == (peer > rank()) ? backend.send(token, peer, 0) : backend.recv(token, peer, 0);
    }
    if (group_.device.is_cpu()) {
      work->wait();
    } else {
      tokens_.push_back(token.front());
    }
  }
  open_.insert(peer);
}

BackendWork C10dCommunicator::issue_message(bool sending, std::vector<at::Tensor> tensors, int peer) {
  c10d::Backend& backend = messages(/*to_higher_rank=*/sending == (peer > rank()));
  return sending ? backend.send(tensors, peer, 0) : backend.recv(tensors, peer, 0);
}

void C10dCommunicator::for_each_backend(const std::function<void(c10d::Backend&)>& use) const {
  for (const BackendPointer& backend : {collectives_, upwards_, downwards_}) {
    if (backend) use(*backend);
  }
}

std::shared_ptr<Communicator> C10dCommunicator::make_group(const std::vector<int>& ranks, const std::string& name,
                                                           GroupUse use) {
  require(!ranks.empty() && std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) && ranks.front() >= 0 &&
              ranks.back() < size(),
          "new_group '", name, "': expected ascending ranks of group '", this->name(), "' in [0, ", size(), ")");
  const std::string prefix = cat(name, "#", groups_made_++, "/", ranks.front());
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return nullptr;
  C10dGroup sub = group_;
  sub.store = c10::make_intrusive<c10d::PrefixStore>(prefix, group_.store);
  sub.rank = static_cast<int>(own - ranks.begin());
  sub.size = static_cast<int>(ranks.size());
  sub.name = name;
  sub.use = use;
  return make_c10d_communicator(sub);
}

Work C10dCommunicator::launch(Collective collective) {
  const at::NoGradGuard no_grad;
  const auto operation = lazy([&] { return OperationName(collective); });
  for (const at::Tensor& tensor : {collective.input, collective.output}) {
    require(!tensor.defined() || tensor.device() == group_.device, operation, ": expected a tensor on ", group_.device,
            ", found ", describe(tensor));
  }
  const bool sending = collective.kind == CollectiveKind::kSend;
  const bool message = sending || collective.kind == CollectiveKind::kRecv;
  require(message || group_.use == GroupUse::kAll, operation, place_->text,
          ": expected a group for collectives, found ",
          "one that was made for messages alone: make it with new_group(ranks, name)");
  if (message && collective.peer == rank()) {
    return sending ? self_.send(collective.input, collective.tag)
                   : self_.recv(collective.output, collective.tag, OperationName(collective));
  }
  try {
    if (message) open_pair(collective.peer);
    const auto lock = recorder_lock();
    Issued issued = issue(collective);
    // An operation with something left to do afterwards ends where somebody waits.
    if (!group_.device.is_cpu() && !issued.finish) {
      for (const auto& timer : collective.timers) timer->issued([&] { issued.work->wait(); });
    }
    return Work(std::make_shared<BackendState>(std::move(issued.work), std::move(issued.finish),
                                               OperationName(collective), place_));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    *place_->failed = true;
    throw CommError(cat(operation, place_->text, ": ", without_stack(error.what())));
  }
}

C10dCommunicator::Issued C10dCommunicator::issue(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kReduceScatter:
      require_reducible(c.input.scalar_type(), c.op, lazy([&] { return OperationName(c); }));
      if (is_bitwise(c.op) && c.input.scalar_type() != at::kBool) return issue_bitwise(c);
      return issue_reduction(c);
    case CollectiveKind::kBarrier:
      return issue_barrier();
    default:
      return {issue_copy(c), nullptr};
  }
}

// The current stream waits, and then the host for it.
C10dCommunicator::Issued C10dCommunicator::issue_barrier() {
  const at::Tensor token = at::zeros({1}, at::TensorOptions(group_.device).dtype(at::kInt));
  return {issue_on(CollectiveKind::kAllReduce, token, token, ReduceOp::kMax, 0), [token] { token.item(); }};
}

C10dCommunicator::Issued C10dCommunicator::issue_reduction(const Collective& c) {
  const auto dtype = c.input.scalar_type();
  const bool integer = at::isIntegralType(dtype, true);
  at::Tensor input = c.input.detach();
  at::Tensor output = c.output.detach();
  const bool same = c.input.is_same(c.output);
  const bool converted = dtype == at::kShort;
  if (dtype == at::kBool) {
    input = input.view(at::kByte);
    output = output.view(at::kByte);
  } else if (converted) {
    input = input.to(at::kInt);
    output = same ? input : at::empty(output.sizes(), input.options());
  }
  const bool divide = c.op == ReduceOp::kAvg && (integer || !group_.averages);
  const auto work = issue_on(c.kind, output, same ? output : input, divide ? ReduceOp::kSum : c.op, c.peer);
  if (!divide && !converted) return {work, nullptr};
  // The results of reduce are on root only: elsewhere the contents do not matter.
  const int64_t ranks = divide ? size() : 1;
  return {work, [target = c.output.detach(), output, input, ranks, integer] {
            if (ranks > 1 && integer) output.div_(ranks, "trunc");
            if (ranks > 1 && !integer) output.div_(ranks);
            if (!output.is_same(target) && output.data_ptr() != target.data_ptr()) target.copy_(output);
          }};
}

C10dCommunicator::Issued C10dCommunicator::issue_bitwise(const Collective& c) {
  const at::Tensor input = c.input.detach().view(-1);
  const at::Tensor all = at::empty({size(), input.numel()}, input.options());
  auto work = issue_on(CollectiveKind::kAllGather, as_bytes(all), as_bytes(input), c.op, 0);
  const int64_t count = c.output.numel();
  const int64_t begin = c.kind == CollectiveKind::kReduceScatter ? rank() * count : 0;
  return {std::move(work), [all, target = c.output.detach().view(-1), begin, count, op = c.op] {
            const at::Tensor result = all[0].narrow(0, begin, count);
            for (int64_t r = 1; r < all.size(0); ++r) combine_bitwise(result, all[r].narrow(0, begin, count), op);
            target.copy_(result);
          }};
}

BackendWork C10dCommunicator::issue_copy(const Collective& c) {
  const at::Tensor input = as_bytes(c.input);
  const at::Tensor output = as_bytes(c.output);
  if (c.kind != CollectiveKind::kAllToAll) return issue_on(c.kind, output, input, c.op, c.peer);
  const auto row_bytes = [](const at::Tensor& tensor) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    return rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
  };
  auto to = c.input_splits;
  auto from = c.output_splits;
  if (to.empty() != from.empty()) {
    auto& even = to.empty() ? to : from;
    const at::Tensor& tensor = to.empty() ? c.input : c.output;
    even.assign(size(), (tensor.dim() == 0 ? 1 : tensor.size(0)) / size());
  }
  for (int64_t& rows : to) rows *= row_bytes(c.input);
  for (int64_t& rows : from) rows *= row_bytes(c.output);
  at::Tensor out = output;
  at::Tensor in = input;
  return collectives_->alltoall_base(out, in, from, to);
}

std::vector<at::Tensor> C10dCommunicator::parts_of(const at::Tensor& bytes) const {
  if (!bytes.defined()) return {};
  return bytes.chunk(size());
}

BackendWork C10dCommunicator::issue_on(CollectiveKind kind, at::Tensor output, at::Tensor input, ReduceOp op,
                                       int root) {
  std::vector<at::Tensor> tensors{output};
  std::vector<at::Tensor> inputs{input};
  std::vector<std::vector<at::Tensor>> lists;
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return collectives_->allreduce(tensors, {.reduceOp = c10d_op(op)});
    case CollectiveKind::kReduce:
      return collectives_->reduce(tensors, {.reduceOp = c10d_op(op), .rootRank = root});
    case CollectiveKind::kReduceScatter:
      return collectives_->_reduce_scatter_base(output, input, {.reduceOp = c10d_op(op)});
    case CollectiveKind::kBroadcast:
      return collectives_->broadcast(tensors, {.rootRank = root});
    case CollectiveKind::kAllGather:
      return collectives_->_allgather_base(output, input);
    case CollectiveKind::kGather:
      if (output.defined()) lists.push_back(parts_of(output));
      return collectives_->gather(lists, inputs, {.rootRank = root});
    case CollectiveKind::kScatter:
      if (input.defined()) lists.push_back(parts_of(input));
      return collectives_->scatter(tensors, lists, {.rootRank = root});
    case CollectiveKind::kSend:
      return issue_message(/*sending=*/true, inputs, root);
    case CollectiveKind::kRecv:
      return issue_message(/*sending=*/false, tensors, root);
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kBarrier:
      break;
  }
  ensure(false, "all_to_all and barrier are issued elsewhere");
  return {};
}

}  // namespace

std::shared_ptr<Communicator> make_c10d_communicator(const C10dGroup& group) {
  return make_shared_where_made<C10dCommunicator>(group);
}

}  // namespace ds::comm
