#include "tools/bench/trial.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "core/check.h"

namespace ds::tool::bench {
namespace {

void finish(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

at::Tensor joined(int ranks, const std::function<at::Tensor(int)>& part) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < ranks; ++rank) parts.push_back(part(rank));
  return at::cat(parts);
}

constexpr int64_t kPeriod = 509;
constexpr int64_t kPlainLimit = 127;  // of values that are only copied
constexpr int64_t kSummedLimit = 8;

// All integers up to it are exact.
int64_t exact_up_to(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 1 << 8;
    case at::kHalf:
      return 1 << 11;
    case at::kChar:
      return 127;
    case at::kByte:
      return 255;
    default:
      return 1 << 24;
  }
}

int64_t combined(comm::ReduceOp op, int64_t one, int64_t other) {
  if (op == comm::ReduceOp::kSum) return one + other;
  return op == comm::ReduceOp::kMin ? std::min(one, other) : std::max(one, other);
}

}  // namespace

bool is_offered(Operation operation, bool in_place) {
  switch (operation) {
    case Operation::kAllReduce:
    case Operation::kBroadcast:
    case Operation::kReduce:
      return in_place;
    case Operation::kAllToAll:
    case Operation::kSendRecv:
    case Operation::kBarrier:
      return !in_place;
    case Operation::kAllGather:
    case Operation::kReduceScatter:
      break;
  }
  return true;
}

bool is_reduction(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduce ||
         operation == Operation::kReduceScatter;
}

Trial::Trial(comm::Communicator& ranks, const TrialOptions& options)
    : ranks_(ranks),
      options_(options),
      values_(options.dtype, options.device, ranks.size(), is_reduction(options.operation)) {
  ensure(is_offered(options.operation, options.in_place), "a trial is of what the communicator offers");
  const int64_t part = options.count;
  const int64_t whole = part * ranks.size();
  // Written at once: a page that was only read is the kernel's page of zeros, which no cache ever misses.
  const auto make = [&](int64_t elements) {
    return at::empty({elements}, at::TensorOptions(options.dtype).device(options.device)).fill_(0);
  };
  switch (options.operation) {
    case Operation::kAllReduce:
    case Operation::kBroadcast:
    case Operation::kReduce:
      input_ = result_ = make(part);
      break;
    case Operation::kAllGather:
      result_ = make(whole);
      input_ = options.in_place ? result_.narrow(0, ranks.rank() * part, part) : make(part);
      break;
    case Operation::kReduceScatter:
      input_ = make(whole);
      result_ = options.in_place ? input_.narrow(0, ranks.rank() * part, part) : make(part);
      break;
    case Operation::kAllToAll:
      input_ = make(whole);
      result_ = make(whole);
      break;
    case Operation::kSendRecv:
      input_ = make(part);
      result_ = make(part);
      break;
    case Operation::kBarrier:
      break;
  }
}

void Trial::run() {
  const int next = (ranks_.rank() + 1) % ranks_.size();
  const int previous = (ranks_.rank() + ranks_.size() - 1) % ranks_.size();
  switch (options_.operation) {
    case Operation::kAllReduce:
      return ranks_.all_reduce(result_, options_.reduce_op).wait();
    case Operation::kAllGather:
      return ranks_.all_gather(result_, input_).wait();
    case Operation::kReduceScatter:
      return ranks_.reduce_scatter(result_, input_, options_.reduce_op).wait();
    case Operation::kBroadcast:
      return ranks_.broadcast(result_, options_.root).wait();
    case Operation::kReduce:
      return ranks_.reduce(result_, options_.root, options_.reduce_op).wait();
    case Operation::kAllToAll:
      return ranks_.all_to_all(result_, input_).wait();
    case Operation::kSendRecv: {
      // NCCL runs what goes between two ranks in order: one of the two must receive first.
      const bool sends_first = ranks_.rank() % 2 == 0;
      comm::Work sent = sends_first ? ranks_.isend(input_, next) : comm::Work();
      const comm::Work received = ranks_.irecv(result_, previous);
      if (!sends_first) sent = ranks_.isend(input_, next);
      received.wait();
      return sent.wait();
    }
    case Operation::kBarrier:
      return ranks_.barrier();
  }
}

double Trial::time(int warmup, int iterations) {
  if (input_.defined()) input_.fill_(0);  // sums of zeros stay what they are
  for (int i = 0; i < warmup; ++i) run();
  finish(options_.device);
  ranks_.barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iterations; ++i) run();
  finish(options_.device);
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / iterations;
}

void Trial::fill() {
  result_.fill_(values_.never());
  const bool gives = options_.operation != Operation::kBroadcast || ranks_.rank() == options_.root;
  if (gives) input_.copy_(values_.of_rank(ranks_.rank(), 0, input_.numel()));
}

at::Tensor Trial::expected() const {
  const int64_t count = options_.count;
  const int rank = ranks_.rank();
  switch (options_.operation) {
    case Operation::kAllReduce:
      return values_.of_all(options_.reduce_op, 0, count);
    case Operation::kReduce:
      return rank == options_.root ? values_.of_all(options_.reduce_op, 0, count) : at::Tensor();
    case Operation::kReduceScatter:
      return values_.of_all(options_.reduce_op, rank * count, count);
    case Operation::kBroadcast:
      return values_.of_rank(options_.root, 0, count);
    case Operation::kAllGather:
      return joined(ranks_.size(), [&](int giver) { return values_.of_rank(giver, 0, count); });
    case Operation::kAllToAll:
      return joined(ranks_.size(), [&](int giver) { return values_.of_rank(giver, rank * count, count); });
    case Operation::kSendRecv:
      return values_.of_rank((rank + ranks_.size() - 1) % ranks_.size(), 0, count);
    case Operation::kBarrier:
      break;
  }
  return {};
}

int64_t Trial::count_wrong() {
  if (!result_.defined()) return 0;
  fill();
  run();
  finish(options_.device);
  const at::Tensor right = expected();
  return right.defined() ? at::ne(result_, right).sum().item<int64_t>() : 0;
}

ExpectedValues::ExpectedValues(at::ScalarType dtype, at::Device device, int ranks, bool reduced)
    : dtype_(dtype), device_(device), ranks_(ranks), limit_(kPlainLimit), giving_(ranks) {
  if (!reduced) return;
  // `never` must not be a sum either.
  const int64_t most = std::min<int64_t>(exact_up_to(dtype), 126);
  limit_ = std::clamp<int64_t>(most / ranks + 1, 2, kSummedLimit);
  giving_ = static_cast<int>(std::min<int64_t>(ranks, most / (limit_ - 1)));
}

int64_t ExpectedValues::value(int rank, int64_t position) const {
  if (rank >= giving_) return 0;
  return (int64_t{29} * rank + position * 13 + position * position) % limit_;
}

at::Tensor ExpectedValues::repeat(const std::vector<double>& period, int64_t start, int64_t count) const {
  std::vector<double> turned = period;
  std::rotate(turned.begin(), turned.begin() + start % kPeriod, turned.end());
  const at::Tensor once = at::tensor(turned).to(device_, dtype_);
  return once.repeat({(count + kPeriod - 1) / kPeriod}).narrow(0, 0, count);
}

at::Tensor ExpectedValues::of_rank(int rank, int64_t start, int64_t count) const {
  std::vector<double> period;
  for (int64_t i = 0; i < kPeriod; ++i) period.push_back(static_cast<double>(value(rank, i)));
  return repeat(period, start, count);
}

at::Tensor ExpectedValues::of_all(comm::ReduceOp op, int64_t start, int64_t count) const {
  std::vector<double> period;
  for (int64_t i = 0; i < kPeriod; ++i) {
    int64_t result = value(0, i);
    for (int rank = 1; rank < ranks_; ++rank) result = combined(op, result, value(rank, i));
    period.push_back(static_cast<double>(result));
  }
  return repeat(period, start, count);
}

}  // namespace ds::tool::bench
