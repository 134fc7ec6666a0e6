#include "comm/collective.h"
#include "dsengine/comm.h"

#include <ATen/core/grad_mode.h>

#include <functional>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "comm/collective_observer.h"
#include "core/check.h"
#include "core/replay/memory_writes.h"
#include "core/tensor_check.h"
#include "core/text.h"
#include "core/trace_span.h"

namespace ds::comm {
namespace {

int64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; }

// Returns a copy of the text that stays for the rest of the process, one for each text.
const char* kept_text(const char* text) {
  static std::mutex mutex;
  static auto& texts = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return texts.emplace(text).first->c_str();
}

// "all_reduce (bucket 3)", without the label where there is none.
struct About {
  const char* what;
  const std::string& label;

  friend std::ostream& operator<<(std::ostream& out, const About& about) {
    out << about.what;
    return about.label.empty() ? out : out << " (" << about.label << ")";
  }
};

About about(const char* what, const std::string& label) { return {what, label}; }

void require_plain(const char* what, const std::string& label, const char* role, const at::Tensor& tensor) {
  require(tensor.defined(), about(what, label), ": expected a tensor as ", role, ", found an undefined one");
  require(tensor.is_contiguous(), about(what, label), ": expected a contiguous ", role, ", found ", describe(tensor),
          " with strides ", tensor.strides(), "; pass tensor.contiguous()");
}

void require_times(const char* what, const std::string& label, const at::Tensor& large, const at::Tensor& small,
                   int size) {
  require(large.numel() == small.numel() * size && large.scalar_type() == small.scalar_type(), about(what, label),
          ": expected ", size, " times the elements and the same dtype, found ", describe(large), " against ",
          describe(small));
}

}  // namespace

const char* name_of(CollectiveKind kind) {
  static constexpr const char* kNames[kCollectiveKinds] = {"broadcast", "all_reduce", "reduce",         "all_gather",
                                                           "gather",    "scatter",    "reduce_scatter", "all_to_all",
                                                           "send",      "recv",       "barrier"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  return kNames[static_cast<size_t>(op)];
}

std::vector<int64_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const auto total = static_cast<int64_t>(tensor.nbytes());
  if (splits.empty()) return std::vector<int64_t>(static_cast<size_t>(size), total / size);
  std::vector<int64_t> bytes(splits);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  for (int64_t& part : bytes) part = rows == 0 ? 0 : part * (total / rows);
  return bytes;
}

bool Work::is_completed() const { return !state_ || state_->is_completed(); }

bool Work::is_ready() const { return !state_ || state_->is_ready(); }

void Work::wait() const {
  if (!state_) return;
  const TraceSpan span([] { return "wait for a collective"; });
  state_->wait();
}

int64_t CommCounters::total_bytes_sent() const {
  return std::accumulate(bytes_sent.begin(), bytes_sent.end(), int64_t{0});
}

Communicator::Communicator(int rank, int size, std::string name)
    : rank_(rank), size_(size), name_(std::move(name)), family_(std::make_shared<GroupFamily>()) {
  require(size > 0 && rank >= 0 && rank < size, "communicator ", name_, ": expected a rank in [0, ", size, "), found ",
          rank);
}

void Communicator::require_peer(const char* what, const std::string& label, int peer) const {
  require(peer >= 0 && peer < size_, about(what, label), ": expected a rank of group ", name_, " in [0, ", size_,
          "), found ", peer);
}

void Communicator::require_splits(const std::string& label, const char* role, const at::Tensor& tensor,
                                  const std::vector<int64_t>& splits) const {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    require(rows % size_ == 0, about("all_to_all", label), ": expected dimension 0 of the ", role, " to divide by ",
            size_, " ranks, found ", describe(tensor), "; pass splits");
    return;
  }
  const int64_t total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  require(static_cast<int>(splits.size()) == size_ && total == rows, about("all_to_all", label), ": expected ", size_,
          " ", role, " splits that add up to ", rows, ", found ", splits.size(), " that add up to ", total);
}

Work Communicator::copy_alone(const at::Tensor& output, const at::Tensor& input) const {
  const at::NoGradGuard no_grad;
  if (output.data_ptr() != input.data_ptr()) output.view(-1).copy_(input.view(-1));
  return {};
}

std::shared_ptr<Communicator> Communicator::new_group(const std::vector<int>& ranks, const std::string& name,
                                                      GroupUse use) {
  std::shared_ptr<Communicator> group;
  Collective meeting{.step = family_->step, .phase = family_->phase, .label = cat("new_group ", name)};
  std::function<void()> make = [&] {
    group = use == GroupUse::kMessages ? make_message_group(ranks, name) : make_group(ranks, name);
  };
  // Each observer is around those after it.
  for (auto own = observers_.rbegin(); own != observers_.rend(); ++own) {
    make = [&meeting, &around = *own, inside = std::move(make)] {
      around.observer->observe_making(around.group, meeting, inside);
    };
  }
  make();
  if (!group) return group;
  group->family_ = family_;
  for (const Observation& own : observers_) {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(own.ranks[static_cast<size_t>(rank)]);
    const int number = own.observer->add_group(name, members, group->rank());
    group->observers_.push_back({own.observer, number, std::move(members)});
  }
  return group;
}

void Communicator::observe_with(std::shared_ptr<CollectiveObserver> observer) {
  std::vector<int> all(static_cast<size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  const int number = observer->add_group(name_, all, rank_);
  observers_.push_back({std::move(observer), number, std::move(all)});
}

void Communicator::note_phase(const char* name, int64_t step, int64_t micro_step) const {
  family_->step = step;
  family_->phase = kept_text(name);
  for (const Observation& own : observers_) own.observer->phase(name, step, micro_step);
}

std::string Communicator::verdict() const {
  for (const Observation& own : observers_) {
    if (std::string text = own.observer->verdict(); !text.empty()) return text;
  }
  return {};
}

void Communicator::keep_watch(std::shared_ptr<FlightWatch> watch) { watch_ = std::move(watch); }

Work Communicator::checked_launch(Collective collective) {
  require(family_->process.is_this(), about(name_of(collective.kind), collective.label), ": this process was forked ",
          "from a rank, and has none of the threads that reach the other ranks. Start a program of its own ",
          "(fork and exec), or let the rank itself do it");
  collective.step = family_->step;
  collective.phase = family_->phase;
  note_memory_write(collective.output);
  const int64_t before = counters_.total_bytes_sent();
  count(collective);
  const TraceSpan span([&] {
    return cat(name_of(collective.kind), ' ', collective.label, " | ", name_, " | sent ",
               counters_.total_bytes_sent() - before, " bytes");
  });
  return observed_launch(collective, 0);
}

Work Communicator::observed_launch(Collective& collective, size_t first) {
  if (first == observers_.size()) return launch(std::move(collective));
  const Observation& own = observers_[first];
  return own.observer->observe(own.group, collective, [&] { return observed_launch(collective, first + 1); });
}

void Communicator::count(const Collective& collective) {
  const auto kind = static_cast<size_t>(collective.kind);
  ++counters_.calls[kind];
  const int64_t others = size_ - 1;
  const bool is_root = rank_ == collective.peer;
  int64_t& sent = counters_.bytes_sent[kind];
  switch (collective.kind) {
    case CollectiveKind::kAllReduce:
      sent += 2 * bytes_of(collective.input) * others / size_;
      break;
    case CollectiveKind::kReduceScatter:
      sent += bytes_of(collective.input) * others / size_;
      break;
    case CollectiveKind::kAllGather:
      sent += bytes_of(collective.output) * others / size_;
      break;
    case CollectiveKind::kBroadcast:
      sent += is_root && others > 0 ? bytes_of(collective.input) : 0;
      break;
    case CollectiveKind::kScatter:
      sent += is_root ? bytes_of(collective.input) * others / size_ : 0;
      break;
    case CollectiveKind::kReduce:
    case CollectiveKind::kGather:
      sent += is_root ? 0 : bytes_of(collective.input);
      break;
    case CollectiveKind::kAllToAll: {
      int64_t own = bytes_of(collective.input) / size_;
      if (!collective.input_splits.empty() && collective.input.numel() > 0) {
        own =
            bytes_of(collective.input) / collective.input.size(0) * collective.input_splits[static_cast<size_t>(rank_)];
      }
      sent += bytes_of(collective.input) - own;
      break;
    }
    case CollectiveKind::kSend:
      sent += is_root ? 0 : bytes_of(collective.input);
      break;
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
  }
}

Work Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op, std::string label) {
  require_plain("all_reduce", label, "tensor", tensor);
  if (size_ == 1) return {};
  return checked_launch(
      {.kind = CollectiveKind::kAllReduce, .op = op, .input = tensor, .output = tensor, .label = std::move(label)});
}

Work Communicator::broadcast(const at::Tensor& tensor, int root, std::string label) {
  require_plain("broadcast", label, "tensor", tensor);
  require_peer("broadcast", label, root);
  if (size_ == 1) return {};
  return checked_launch(
      {.kind = CollectiveKind::kBroadcast, .input = tensor, .output = tensor, .peer = root, .label = std::move(label)});
}

Work Communicator::reduce(const at::Tensor& tensor, int root, ReduceOp op, std::string label) {
  require_plain("reduce", label, "tensor", tensor);
  require_peer("reduce", label, root);
  if (size_ == 1) return {};
  return checked_launch({.kind = CollectiveKind::kReduce,
                         .op = op,
                         .input = tensor,
                         .output = tensor,
                         .peer = root,
                         .label = std::move(label)});
}

Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input, std::string label) {
  require_plain("all_gather", label, "input", input);
  require_plain("all_gather", label, "output", output);
  require_times("all_gather", label, output, input, size_);
  if (size_ == 1) return copy_alone(output, input);
  return checked_launch(
      {.kind = CollectiveKind::kAllGather, .input = input, .output = output, .label = std::move(label)});
}

Work Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string label) {
  require_plain("reduce_scatter", label, "input", input);
  require_plain("reduce_scatter", label, "output", output);
  require_times("reduce_scatter", label, input, output, size_);
  if (size_ == 1) return copy_alone(output, input);
  return checked_launch(
      {.kind = CollectiveKind::kReduceScatter, .op = op, .input = input, .output = output, .label = std::move(label)});
}

Work Communicator::gather(const at::Tensor& output, const at::Tensor& input, int root, std::string label) {
  require_plain("gather", label, "input", input);
  require_peer("gather", label, root);
  if (rank_ == root) {
    require_plain("gather", label, "output on the root", output);
    require_times("gather", label, output, input, size_);
  }
  if (size_ == 1) return copy_alone(output, input);
  return checked_launch({.kind = CollectiveKind::kGather,
                         .input = input,
                         .output = rank_ == root ? output : at::Tensor(),
                         .peer = root,
                         .label = std::move(label)});
}

Work Communicator::scatter(const at::Tensor& output, const at::Tensor& input, int root, std::string label) {
  require_plain("scatter", label, "output", output);
  require_peer("scatter", label, root);
  if (rank_ == root) {
    require_plain("scatter", label, "input on the root", input);
    require_times("scatter", label, input, output, size_);
  }
  if (size_ == 1) return copy_alone(output, input);
  return checked_launch({.kind = CollectiveKind::kScatter,
                         .input = rank_ == root ? input : at::Tensor(),
                         .output = output,
                         .peer = root,
                         .label = std::move(label)});
}

Work Communicator::all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                              std::vector<int64_t> input_splits, std::string label) {
  require_plain("all_to_all", label, "input", input);
  require_plain("all_to_all", label, "output", output);
  require(input.scalar_type() == output.scalar_type(), about("all_to_all", label), ": expected one dtype, found ",
          describe(input), " and ", describe(output));
  require(output.numel() == 0 || input.numel() == 0 || !output.is_alias_of(input), about("all_to_all", label),
          ": expected input and output in different memory");
  require_splits(label, "input", input, input_splits);
  require_splits(label, "output", output, output_splits);
  if (size_ == 1) return copy_alone(output, input);
  return checked_launch({.kind = CollectiveKind::kAllToAll,
                         .input = input,
                         .output = output,
                         .input_splits = std::move(input_splits),
                         .output_splits = std::move(output_splits),
                         .label = std::move(label)});
}

Work Communicator::isend(const at::Tensor& tensor, int destination, int tag, std::string label) {
  require_plain("send", label, "tensor", tensor);
  require_peer("send", label, destination);
  return checked_launch(
      {.kind = CollectiveKind::kSend, .input = tensor, .peer = destination, .tag = tag, .label = std::move(label)});
}

Work Communicator::irecv(const at::Tensor& tensor, int source, int tag, std::string label) {
  require_plain("recv", label, "tensor", tensor);
  require_peer("recv", label, source);
  return checked_launch(
      {.kind = CollectiveKind::kRecv, .output = tensor, .peer = source, .tag = tag, .label = std::move(label)});
}

void Communicator::barrier(std::string label) {
  if (size_ == 1) return;
  checked_launch({.kind = CollectiveKind::kBarrier, .label = std::move(label)}).wait();
}

}  // namespace ds::comm
