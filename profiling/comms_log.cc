#include "profiling/comms_log.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>

#include "core/log.h"
#include "profiling/comms_table.h"

namespace ds::profiling {
namespace {

using comm::Collective;
using comm::CollectiveKind;
using comm::Work;

int64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; }

c10::Device device_of(const Collective& c) {
  const at::Tensor& tensor = c.input.defined() ? c.input : c.output;
  return tensor.defined() ? tensor.device() : c10::Device(c10::kCPU);
}

// An operation that failed tells whoever waits for it.
bool is_over(const Work& work) {
  try {
    return work.is_completed();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

int64_t whole_bytes(const Collective& c, size_t ranks) {
  const auto n = static_cast<int64_t>(ranks);
  switch (c.kind) {
    case CollectiveKind::kAllGather:
      return bytes_of(c.output);
    case CollectiveKind::kGather:
      return bytes_of(c.input) * n;
    case CollectiveKind::kScatter:
      return bytes_of(c.output) * n;
    case CollectiveKind::kRecv:
      return bytes_of(c.output);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kSend:
    case CollectiveKind::kBarrier:
      break;
  }
  return bytes_of(c.input);
}

// The observer of a group and of the groups that are made of its ranks.
class CommsLog::Observer final : public comm::CollectiveObserver {
 public:
  Observer(std::shared_ptr<CommsLog> log, std::vector<int> ranks) : log_(std::move(log)), ranks_(std::move(ranks)) {}

  int add_group(const std::string& name, const std::vector<int>& ranks, int /*own*/) override {
    std::vector<int> of_world;
    for (const int rank : ranks) of_world.push_back(ranks_.at(static_cast<size_t>(rank)));
    return log_->add_group(name, std::move(of_world));
  }
  Work observe(int group, Collective& collective, c10::function_ref<Work()> launch) override {
    return log_->observe(group, collective, launch);
  }
  // No operation of the program's.
  void observe_making(int /*group*/, Collective& /*meeting*/, c10::function_ref<void()> make) override { make(); }
  void phase(const char* /*name*/, int64_t step, int64_t /*micro_step*/) override { log_->step_begins(step); }

 private:
  std::shared_ptr<CommsLog> log_;
  std::vector<int> ranks_;
};

// The time of one operation, from its launch on. Ends once.
class CommsLog::Operation final : public comm::OperationTimer {
 public:
  Operation(std::shared_ptr<CommsLog> log, const Subject& subject, c10::Device device)
      : log_(std::move(log)), subject_(subject), clock_(device), device_(device), begin_(log_->clock_()) {
    if (!device_.is_cpu()) begin_on_device_ = clock_.mark();
  }

  void ended() override {
    if (!over_.exchange(true)) log_->end_on_host(subject_, begin_);
  }
  void issued(c10::function_ref<void()> order) override {
    if (device_.is_cpu()) return;
    const c10::StreamGuard behind(log_->stream_of(subject_, device_));
    order();
    end_on_device();
  }
  // Somebody has waited: on a device, its current stream.
  void waited() { device_.is_cpu() ? ended() : end_on_device(); }
  void failed() { over_ = true; }
  // Nobody will wait.
  void released(const Work& work, std::vector<at::Tensor> tensors) {
    if (end_on_device_) return log_->hold(std::move(tensors), *end_on_device_);
    if (device_.is_cpu() && !over_ && is_over(work)) ended();
  }

 private:
  void end_on_device() {
    if (over_.exchange(true)) return;
    end_on_device_ = clock_.mark();
    log_->end_on_device({.subject = subject_, .begin = begin_on_device_, .end = *end_on_device_});
  }

  std::shared_ptr<CommsLog> log_;
  Subject subject_;
  DeviceClock clock_;
  c10::Device device_;
  double begin_;
  Moment begin_on_device_;
  std::optional<Moment> end_on_device_;
  std::atomic<bool> over_{false};
};

// The caller's. Holds the tensors of a device until it has been waited for: see comm::OperationTimer::issued.
class CommsLog::TimedWork final : public comm::WorkState {
 public:
  TimedWork(std::shared_ptr<Operation> operation, Work work, std::vector<at::Tensor> tensors)
      : operation_(std::move(operation)), work_(std::move(work)), tensors_(std::move(tensors)) {}
  TimedWork(const TimedWork&) = delete;
  TimedWork& operator=(const TimedWork&) = delete;
  ~TimedWork() override {
    if (!waited_) operation_->released(work_, std::move(tensors_));
  }

  bool is_completed() override { return work_.is_completed(); }
  bool is_ready() override { return work_.is_ready(); }
  void wait() override {
    try {
      work_.wait();
    } catch (...) {
      operation_->failed();
      throw;
    }
    operation_->waited();
    waited_ = true;
    tensors_.clear();
  }

 private:
  std::shared_ptr<Operation> operation_;
  Work work_;
  std::vector<at::Tensor> tensors_;
  std::atomic<bool> waited_{false};
};

CommsLog::CommsLog(const CommsLogOptions& options, Clock clock) : options_(options), clock_(std::move(clock)) {}

std::shared_ptr<comm::CollectiveObserver> CommsLog::observer_of(std::vector<int> ranks) {
  return std::make_shared<Observer>(shared_from_this(), std::move(ranks));
}

bool CommsLog::sees(const std::string& group) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(groups_.begin(), groups_.end(), [&](const Group& one) { return one.name == group; });
}

int CommsLog::add_group(const std::string& name, std::vector<int> ranks) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_.emplace_back();
  const auto same = std::count_if(groups_.begin(), groups_.end(), [&](const Group& one) {
    return one.ranks == ranks && (one.name == name || one.name.starts_with(name + "#"));
  });
  group.name = same == 0 ? name : cat(name, "#", same + 1);
  group.ranks = std::move(ranks);
  return static_cast<int>(groups_.size()) - 1;
}

CommsLog::Subject CommsLog::begin(int group, const Collective& c) {
  const std::lock_guard lock(mutex_);
  Group& own = groups_[static_cast<size_t>(group)];
  const int64_t bytes = whole_bytes(c, own.ranks.size());
  Key key{.kind = c.kind, .label = options_.with_labels ? c.label : std::string(), .bytes = bytes};
  auto found = own.records.find(key);
  if (found == own.records.end() && own.records.size() >= kMostSizes) {
    key.label.clear();
    key.bytes = kOtherSizes;
    found = own.records.find(key);
  }
  if (found == own.records.end()) {
    CommsRecord record{.operation = comm::name_of(c.kind), .kind = c.kind, .group = own.name, .ranks = own.ranks};
    if (!key.label.empty()) record.operation += cat(" | ", key.label);
    record.bytes = key.bytes;
    found = own.records.emplace(std::move(key), std::move(record)).first;
  }
  return {.group = &own,
          .record = &found->second,
          .number = found->second.launch(),
          .bytes = bytes,
          .kind = c.kind,
          .peer = c.peer};
}

Work CommsLog::observe(int group, Collective& c, c10::function_ref<Work()> launch) {
  if (pauses_ > 0 || !options_.operations.at(static_cast<size_t>(c.kind))) return launch();
  const c10::Device device = device_of(c);
  std::vector<at::Tensor> tensors;
  if (!device.is_cpu()) tensors = {c.input, c.output};
  const auto operation = std::make_shared<Operation>(shared_from_this(), begin(group, c), device);
  c.timers.push_back(operation);
  Work work;
  try {
    work = launch();
  } catch (...) {
    operation->failed();
    throw;
  }
  return Work(std::make_shared<TimedWork>(operation, std::move(work), std::move(tensors)));
}

// Operations of a group end in order, so each has a stream for what comes behind; messages of two ranks and one
// direction likewise. Not of the pool that NCCL's streams are of: one that they share would wait for both.
c10::Stream CommsLog::stream_of(const Subject& subject, c10::Device device) {
  const std::pair key =
      subject.is_message() ? std::pair(subject.kind, subject.peer) : std::pair(CollectiveKind::kBarrier, 0);
  const std::lock_guard lock(mutex_);
  auto& streams = subject.group->streams;
  const auto found = streams.find(key);
  if (found != streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl impl(device.type());
  return streams.emplace(key, impl.getStreamFromGlobalPool(device, /*isHighPriority=*/false)).first->second;
}

void CommsLog::end_on_host(const Subject& subject, double begin) {
  const double end = clock_();
  std::string line;
  {
    const std::lock_guard lock(mutex_);
    if (!subject.is_message()) begin = std::max(begin, std::exchange(subject.group->last_end, end));
    line = add(subject, end - begin);
  }
  if (!line.empty()) log::info(line);
}

void CommsLog::end_on_device(UnderWay operation) {
  const std::lock_guard lock(mutex_);
  Group& group = *operation.subject.group;
  if (!operation.subject.is_message()) {
    if (group.used_on_device) operation.after = group.last_end_on_device;
    group.last_end_on_device = operation.end;
    group.used_on_device = true;
  }
  under_way_.push_back(std::move(operation));
}

void CommsLog::hold(std::vector<at::Tensor> tensors, const Moment& end) {
  const std::lock_guard lock(mutex_);
  under_way_.push_back({.end = end, .held = std::move(tensors)});
}

std::string CommsLog::add(const Subject& subject, double seconds) {
  subject.record->end(subject.number, seconds, subject.bytes);
  if (!options_.verbose) return {};
  constexpr double kMilliseconds = 1e3;
  const Bandwidth bandwidth =
      bandwidth_of(subject.kind, static_cast<double>(subject.bytes), subject.group->ranks.size(), seconds);
  return cat("rank: ", options_.rank, " | comm op: ", subject.record->operation, " | group: ", subject.group->name,
             " | time (ms): ", fixed(seconds * kMilliseconds, 2), " | msg size: ", size_text(subject.bytes),
             " | algbw (Gbps): ", fixed(bandwidth.algorithm, 2), " | busbw (Gbps): ", fixed(bandwidth.bus, 2));
}

// Each event is asked about once a step.
void CommsLog::step_begins(int64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(step_, step) == step || under_way_.empty()) return;
  }
  read_ended(/*waits=*/false);
}

void CommsLog::read_ended(bool waits) {
  std::deque<UnderWay> rest;
  std::deque<UnderWay> done;  // their tensors are freed without the lock
  {
    const std::lock_guard lock(mutex_);
    done.swap(under_way_);
  }
  std::vector<std::string> lines;
  for (UnderWay& one : done) {
    const bool is_timed = one.subject.record != nullptr;
    if (!(waits && is_timed) && !DeviceClock::passed(one.end)) {
      rest.push_back(std::move(one));
      continue;
    }
    if (!is_timed) continue;
    double seconds = DeviceClock::seconds(one.begin, one.end);
    if (one.after) seconds = std::min(seconds, DeviceClock::seconds(*one.after, one.end));
    const std::lock_guard lock(mutex_);
    lines.push_back(add(one.subject, std::max(seconds, 0.0)));
  }
  {
    const std::lock_guard lock(mutex_);
    under_way_.insert(under_way_.begin(), std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()));
  }
  for (const std::string& line : lines) {
    if (!line.empty()) log::info(line);
  }
}

std::vector<CommsRecord> CommsLog::records(bool waits) {
  read_ended(waits);
  const std::lock_guard lock(mutex_);
  std::vector<CommsRecord> all;
  for (const Group& group : groups_) {
    for (const auto& [key, record] : group.records) {
      if (record.count > 0) all.push_back(record);
    }
  }
  return all;
}

}  // namespace ds::profiling
