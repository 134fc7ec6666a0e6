#include "comm/flight/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/collective.h"
#include "comm/flight/contract.h"
#include "comm/flight/rank_list.h"
#include "core/check.h"
#include "core/device/stream_point.h"
#include "core/log.h"
#include "dsengine/comm.h"

namespace ds::comm {
namespace {

constexpr std::chrono::milliseconds kHeadStart{300};
constexpr size_t kMostOnDevice = 64;
constexpr size_t kRoomForNumber = 4;  // "#12", behind names of groups
constexpr uint32_t kSharedGroup = kFlightGroups - 1;

// Equal for all processes of a host, and goes on while they are stopped.
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool has_root(CollectiveKind kind) {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce || kind == CollectiveKind::kGather ||
         kind == CollectiveKind::kScatter;
}

bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

// Returns a number of elements that is the same on all ranks that issue the same collective.
int64_t shared_elements(const Collective& c) {
  const int64_t in = c.input.defined() ? c.input.numel() : 0;
  const int64_t out = c.output.defined() ? c.output.numel() : 0;
  if (c.kind == CollectiveKind::kGather) return in;
  if (c.kind == CollectiveKind::kScatter) return out;
  return std::max(in, out);
}

// Up to a comma, where it is too long.
std::string whole_part(const std::string& list, size_t limit) {
  return list.size() <= limit ? list : list.substr(0, list.rfind(',', limit - 1)) + ",...";
}

// An operation that failed tells whoever waits for it, not whoever looks.
bool is_over(const Work& work) {
  try {
    return work.is_completed();
  } catch (const std::exception&) {
    return false;
  }
}

// Returns the number of the calling thread, from 1, among those that have made or used the groups.
int32_t number_of_this_thread(std::vector<uint64_t>& threads, FlightHeader& header) {
  static std::atomic<uint64_t> made{0};
  thread_local const uint64_t kOwn = ++made;  // std::thread::id is given again when a thread has ended
  const auto found = std::find(threads.begin(), threads.end(), kOwn);
  const auto number = static_cast<int32_t>(found - threads.begin()) + 1;
  if (found != threads.end()) return number;
  threads.push_back(kOwn);
  header.threads = number;
  return number;
}

uint64_t signature_of(const Collective& c, const at::Tensor& tensor) {
  uint64_t hash = mix(0, static_cast<uint64_t>(c.kind));
  if (reduces(c.kind)) hash = mix(hash, static_cast<uint64_t>(c.op));
  if (has_root(c.kind)) hash = mix(hash, static_cast<uint64_t>(c.peer));
  // The elements that go from rank to rank may differ; even splits may be given or left out.
  if (c.kind != CollectiveKind::kAllToAll) hash = mix(hash, static_cast<uint64_t>(shared_elements(c)));
  if (tensor.defined()) hash = mix(hash, static_cast<uint64_t>(tensor.scalar_type()));
  return mix(hash, c.label);
}

}  // namespace

// An operation of a device that the current stream has been told to wait for. It holds no tensors, as the operation's
// own Work does: 64 of them would keep memory that the program has freed for as long as the host is ahead.
class FlightRecorder::OrderedWork final : public WorkState {
 public:
  explicit OrderedWork(c10::Device device) : point_(StreamPoint::here(device)) {}
  bool is_completed() override { return point_.reached(); }
  void wait() override { point_.wait_on_device(); }

 private:
  StreamPoint point_;
};

// A Work whose waits are recorded.
class FlightRecorder::FollowedWork final : public WorkState {
 public:
  FollowedWork(std::shared_ptr<FlightRecorder> recorder, const Ticket& ticket, Work work)
      : recorder_(std::move(recorder)), ticket_(ticket), work_(std::move(work)) {}
  FollowedWork(const FollowedWork&) = delete;
  FollowedWork& operator=(const FollowedWork&) = delete;
  ~FollowedWork() override {
    if (!waited_) recorder_->ended(ticket_, FlightState::kReleased);
  }

  bool is_completed() override { return work_.is_completed(); }
  bool is_ready() override { return work_.is_ready(); }
  void wait() override {
    waited_ = true;
    recorder_->waiting(ticket_);
    try {
      work_.wait();
    } catch (...) {
      recorder_->failed(ticket_);
      throw;
    }
    if (ticket_.device.is_cuda()) work_ = Work(std::make_shared<OrderedWork>(ticket_.device));
    recorder_->waited(ticket_, work_);
  }

 private:
  std::shared_ptr<FlightRecorder> recorder_;
  Ticket ticket_;
  Work work_;
  std::atomic<bool> waited_{false};
};

FlightRecorder::FlightRecorder(const FlightRecorderOptions& options)
    : memory_(options.file, flight_bytes(options.entries)) {
  require(options.entries >= 1 && options.entries <= kMostFlightEntries, "flight recorder: entries: expected a number ",
          "from 1 to ", kMostFlightEntries, ", found ", options.entries);
  FlightHeader& header = memory_.header();
  set_magic(header);
  header.entries = options.entries;
  header.rank = options.rank;
  header.world_size = options.world_size;
  header.process = getpid();
  header.now_ns = now_ns();
  header.next_sequence = 1;
  header.micro_step = -1;
  header.phase_ns = header.now_ns;
  header.host.assign(options.host);
  number_of_this_thread(threads_, header);  // where others use the groups, the program has more than this one
}

int FlightRecorder::add_group(const std::string& name, const std::vector<int>& ranks, int own) {
  const std::lock_guard lock(mutex_);
  if (memory_.header().groups >= kSharedGroup) return add_to_others();
  FlightGroup& group = memory_.groups()[memory_.header().groups];
  const std::string list = whole_part(rank_list_text(ranks), group.ranks.limit());
  const std::string start = name.substr(0, group.name.limit() - kRoomForNumber);
  const int same = ++names_[{start, list}];
  const std::string number = same == 1 ? "" : cat("#", same);
  group.name.assign(same == 1 ? name : start + number);
  group.ranks.assign(list);
  group.own = own;
  return static_cast<int>(memory_.header().groups++);
}

// Their operations are recorded; they count for nothing.
int FlightRecorder::add_to_others() {
  FlightGroup& others = memory_.groups()[kSharedGroup];
  if (memory_.header().groups == kSharedGroup) {
    log::warning("flight record: there are more than ", kSharedGroup,
                 " groups of ranks; the collectives of later ones are ", "not compared between ranks");
    others.name.assign("of other ranks");
    others.own = -1;
    ++memory_.header().groups;
  }
  return kSharedGroup;
}

Work FlightRecorder::observe(int group, Collective& collective, c10::function_ref<Work()> launch) {
  const Ticket ticket = begin(group, collective);
  try {
    return follow(ticket, launch());
  } catch (...) {
    failed(ticket);
    throw;
  }
}

FlightRecorder::Ticket FlightRecorder::begin(int group, const Collective& c) {
  const std::lock_guard lock(mutex_);
  require<CommError>(doom_.empty(), doom_);
  if (!recording_) return {};
  const at::Tensor& tensor = c.input.defined() ? c.input : c.output;
  const bool message = c.kind == CollectiveKind::kSend || c.kind == CollectiveKind::kRecv;
  const uint64_t sequence = memory_.header().next_sequence;
  const size_t slot = (sequence - 1) % memory_.header().entries;
  FlightEntry& entry = memory_.entries()[slot];
  entry.sequence = 0;  // whoever reads meanwhile leaves it out
  entry.group = static_cast<uint16_t>(group);
  entry.message = message;
  entry.signature = signature_of(c, tensor);
  if (message) {
    entry.position = ++messages_[{group, c.kind, c.peer, c.tag}];
  } else if (memory_.groups()[group].own < 0) {
    entry.position = 0;
  } else {
    extend_contract(memory_.groups()[group], entry.signature);
    entry.position = memory_.groups()[group].position;
  }
  entry.issued_ns = now_ns();
  entry.waited_ns = entry.issued_ns;  // until it is launched, which may wait for others
  entry.ended_ns = 0;
  entry.elements = shared_elements(c);
  entry.step = c.step;
  entry.peer = message || has_root(c.kind) ? c.peer : -1;
  entry.tag = c.tag;
  entry.thread = number_of_this_thread(threads_, memory_.header());
  entry.state = FlightState::kWaiting;
  entry.operation.assign(comm::name_of(c.kind));
  entry.reduction.assign(reduces(c.kind) ? comm::name_of(c.op) : "");
  entry.dtype.assign(tensor.defined() ? c10::toString(tensor.scalar_type()) : "");
  entry.label.assign(c.label);
  entry.phase.assign(c.phase);
  entry.sequence = sequence;
  memory_.header().next_sequence = sequence + 1;
  return {.slot = slot, .sequence = sequence, .device = tensor.defined() ? tensor.device() : c10::Device(c10::kCPU)};
}

FlightEntry* FlightRecorder::find(const Ticket& ticket) const {
  if (ticket.sequence == 0) return nullptr;
  FlightEntry& entry = memory_.entries()[ticket.slot];
  return entry.sequence == ticket.sequence ? &entry : nullptr;
}

void FlightRecorder::waiting(const Ticket& ticket) {
  const std::lock_guard lock(mutex_);
  const int32_t thread = number_of_this_thread(threads_, memory_.header());
  FlightEntry* const entry = find(ticket);
  if (entry == nullptr || entry->state != FlightState::kIssued) return;
  entry->thread = thread;
  entry->state = FlightState::kWaiting;
  entry->waited_ns = now_ns();
}

void FlightRecorder::ended(const Ticket& ticket, FlightState state) {
  if (state == FlightState::kReleased && !process_.is_this()) return;  // Note [Forked children]
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(ticket);
  if (entry == nullptr || entry->ended_ns != 0) return;
  entry->state = state;
  entry->thread = 0;
  entry->ended_ns = now_ns();
  if (state == FlightState::kFailed) memory_.keep();
}

void FlightRecorder::waited(const Ticket& ticket, const Work& work) {
  if (ticket.device.is_cpu()) return ended(ticket, FlightState::kFinished);
  end_those_on_device();
  if (is_over(work)) return ended(ticket, FlightState::kFinished);
  const std::lock_guard lock(mutex_);
  if (FlightEntry* const entry = find(ticket)) entry->thread = 0;  // the device waits, and the host goes on
  on_device_.emplace_back(ticket, work);
  if (on_device_.size() <= kMostOnDevice) return;
  if (FlightEntry* const oldest = find(on_device_.front().first); oldest != nullptr && oldest->ended_ns == 0) {
    oldest->state = FlightState::kReleased;  // nobody looks any more when it is done
    oldest->ended_ns = now_ns();
  }
  on_device_.pop_front();
}

void FlightRecorder::end_those_on_device() {
  std::list<std::pair<Ticket, Work>> done;
  {
    const std::lock_guard lock(mutex_);
    while (!on_device_.empty() && is_over(on_device_.front().second)) {
      done.splice(done.end(), on_device_, on_device_.begin());
    }
  }
  for (const auto& [ticket, work] : done) ended(ticket, FlightState::kFinished);
}

// Most often because another rank has gone: whoever started the ranks is to see the end of that one first.
void FlightRecorder::failed(const Ticket& ticket) {
  ended(ticket, FlightState::kFailed);
  if (!failed_.exchange(true)) std::this_thread::sleep_for(kHeadStart);
}

Work FlightRecorder::follow(const Ticket& ticket, Work work) {
  if (ticket.sequence == 0) return work;
  {
    const std::lock_guard lock(mutex_);
    if (FlightEntry* const entry = find(ticket)) {
      entry->state = FlightState::kIssued;
      entry->thread = 0;
      entry->waited_ns = 0;
    }
  }
  return Work(std::make_shared<FollowedWork>(shared_from_this(), ticket, std::move(work)));
}

void FlightRecorder::phase(const char* name, int64_t step, int64_t micro_step) {
  const std::lock_guard lock(mutex_);
  memory_.header().phase.assign(name);
  memory_.header().step = step;
  memory_.header().micro_step = micro_step;
  memory_.header().phase_ns = now_ns();
}

void FlightRecorder::beat() {
  end_those_on_device();
  const std::lock_guard lock(mutex_);
  memory_.header().now_ns = now_ns();
}

void FlightRecorder::leave() {
  const std::lock_guard lock(mutex_);
  memory_.header().left = 1;
  memory_.header().now_ns = now_ns();
}

void FlightRecorder::stop() {
  const std::lock_guard lock(mutex_);
  recording_ = false;
}

void FlightRecorder::keep() { memory_.keep(); }

void FlightRecorder::doom(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (doom_.empty()) doom_ = text;
}

std::string FlightRecorder::verdict() const {
  const std::lock_guard lock(mutex_);
  return doom_;
}

bool FlightRecorder::held_up_for(std::chrono::nanoseconds time) const {
  const std::lock_guard lock(mutex_);
  const int64_t latest = now_ns() - time.count();
  const FlightEntry* const entries = memory_.entries();
  return std::any_of(entries, entries + memory_.header().entries, [latest](const FlightEntry& entry) {
    return entry.sequence != 0 && entry.thread != 0 && entry.waited_ns <= latest;
  });
}

FlightLog FlightRecorder::log() const {
  const std::lock_guard lock(mutex_);
  return log_from_memory(memory_.data(), memory_.size(), "flight recorder");
}

}  // namespace ds::comm
