// LibTorch's Kineto profiler with a schedule of steps, and its results by name.
#include "dsengine/trace.h"

#include <ATen/Context.h>
#include <ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/kineto_shim.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <filesystem>
#include <iomanip>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/meeting/environment_reader.h"
#include "comm/meeting/started_place.h"
#include "core/check.h"
#include "core/log.h"
#include "core/text.h"
#include "core/trace_span.h"

namespace ds::profiling {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

constexpr double kNanosecondsOfMs = 1e6;

// Kineto has one profiler for all threads of a process.
std::atomic<bool>& is_profiled() {
  static std::atomic<bool> is = false;
  return is;
}

// The rank of this process as ds-launch, torchrun, mpirun or srun have set it; 0 where none of them has started it.
int rank_of_environment() {
  if (const std::optional<std::string> text = comm::process_environment("RANK")) {
    int rank = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), rank);
    require<ConfigError>(error == std::errc() && end == text->data() + text->size() && rank >= 0,
                         "profile(): expected a number from 0 on in the environment variable RANK, found \"", *text,
                         "\"; correct it, or give ProfileOptions::rank");
    return rank;
  }
  const std::optional<comm::StartedPlace> started = comm::started_place(comm::process_environment);
  return started ? started->rank : 0;
}

std::set<ActivityType> activities_of(const std::vector<Activity>& wanted) {
  std::set<ActivityType> activities;
  for (const Activity activity : wanted) {
    activities.insert(activity == Activity::kCpu ? ActivityType::CPU : ActivityType::CUDA);
  }
  if (!activities.empty()) return activities;
  activities.insert(ActivityType::CPU);
  if (at::hasCUDA()) activities.insert(ActivityType::CUDA);
  return activities;
}

// Adds the times of one thread's operators, which nest: what is taken off an operator's own time is what it calls.
void add_thread(std::vector<const kineto::KinetoEvent*> events, std::map<std::string, OperatorTimes>& by_name) {
  std::sort(events.begin(), events.end(), [](const auto* a, const auto* b) {
    return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
  });
  struct Open {
    uint64_t end;
    OperatorTimes* times;
  };
  std::vector<Open> open;
  for (const kineto::KinetoEvent* event : events) {
    while (!open.empty() && open.back().end <= event->startNs()) open.pop_back();
    const double ms = static_cast<double>(event->durationNs()) / kNanosecondsOfMs;
    OperatorTimes& times = by_name[event->name()];
    ++times.calls;
    times.total_ms += ms;
    times.self_ms += ms;
    if (!open.empty()) open.back().times->self_ms -= ms;
    open.push_back({event->endNs(), &times});
  }
}

}  // namespace

struct Trace::Impl {
  std::unique_ptr<kineto::ProfilerResult> result;
  int64_t first_step = 0;
  int rank = 0;
  bool is_written = false;
};

Trace::Trace(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Trace::~Trace() = default;
Trace::Trace(Trace&&) noexcept = default;

int64_t Trace::first_step() const { return impl_->first_step; }
int Trace::rank() const { return impl_->rank; }

std::vector<OperatorTimes> Trace::key_averages() const {
  std::map<std::string, OperatorTimes> by_name;
  std::map<uint64_t, std::vector<const kineto::KinetoEvent*>> threads;
  for (const kineto::KinetoEvent& event : impl_->result->events()) {
    if (event.name() == "[memory]") continue;
    // The time on the device between the first and the last kernel of a span is no kernel's.
    if (event.activityType() == static_cast<uint8_t>(libkineto::ActivityType::GPU_USER_ANNOTATION)) continue;
    if (event.deviceType() == c10::DeviceType::CPU) {
      threads[event.startThreadId()].push_back(&event);
    } else {
      OperatorTimes& times = by_name[event.name()];
      ++times.calls;
      times.device_ms += static_cast<double>(event.durationNs()) / kNanosecondsOfMs;
    }
  }
  for (auto& [thread, events] : threads) add_thread(std::move(events), by_name);
  std::vector<OperatorTimes> rows;
  for (auto& [name, times] : by_name) {
    times.name = name;
    rows.push_back(std::move(times));
  }
  std::stable_sort(rows.begin(), rows.end(), [](const OperatorTimes& a, const OperatorTimes& b) {
    return a.device_ms != b.device_ms ? a.device_ms > b.device_ms : a.self_ms > b.self_ms;
  });
  return rows;
}

std::string Trace::table(size_t rows) const {
  constexpr int kDigits = 3;
  const std::vector<OperatorTimes> all = key_averages();
  const size_t shown = std::min(rows, all.size());
  size_t width = std::string_view("name").size();
  for (size_t i = 0; i < shown; ++i) width = std::max(width, all[i].name.size());
  auto text = classic_stream<std::ostringstream>();
  const auto line = [&](const std::string& name, const std::vector<std::string>& cells) {
    text << std::left << std::setw(static_cast<int>(width)) << name << std::right;
    for (const std::string& cell : cells) text << std::setw(14) << cell;
    text << '\n';
  };
  line("name", {"calls", "self ms", "total ms", "device ms"});
  for (size_t i = 0; i < shown; ++i) {
    const OperatorTimes& row = all[i];
    line(row.name,
         {cat(row.calls), fixed(row.self_ms, kDigits), fixed(row.total_ms, kDigits), fixed(row.device_ms, kDigits)});
  }
  if (shown < all.size()) text << "and " << all.size() - shown << " further names\n";
  return std::move(text).str();
}

void Trace::write(const std::string& path) {
  require(!std::exchange(impl_->is_written, true), "Trace::write(\"", path,
          "\"): expected one call for each trace, found another; Kineto's events are gone with the first");
  const std::filesystem::path file(path);
  std::error_code error;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), error);
  require<IoError>(!error, "trace: cannot make the folder of ", path, ": ", error.message());
  std::filesystem::remove(file, error);
  impl_->result->save(path);
  const auto bytes = std::filesystem::file_size(file, error);
  require<IoError>(!error && bytes > 0, "trace: cannot write ", path,
                   error ? cat(": ", error.message()) : std::string(": the file is empty"),
                   "; expected a folder that can be written, with room for the trace");
}

struct Profiler::Impl {
  explicit Impl(ProfileOptions of) : options(std::move(of)), activities(activities_of(options.activities)) {}

  enum class Action { kNothing, kWarmUp, kRecord };

  Action action_of(int64_t number) const {
    const TraceSchedule& s = options.schedule;
    if (s.active == 0) return number < s.wait ? Action::kNothing : Action::kRecord;
    const int64_t cycle = s.wait + s.warmup + s.active;
    if (s.repeat > 0 && number / cycle >= s.repeat) return Action::kNothing;
    const int64_t place = number % cycle;
    return place < s.wait ? Action::kNothing : place < s.wait + s.warmup ? Action::kWarmUp : Action::kRecord;
  }
  // Whether a window ends before step `number`, the next one: a trace has the steps of one cycle.
  bool window_ends(int64_t number) const {
    const TraceSchedule& s = options.schedule;
    return s.active > 0 && number % (s.wait + s.warmup + s.active) == 0;
  }
  ProfilerConfig config() const {
    return ProfilerConfig(ProfilerState::KINETO, options.record_shapes, options.profile_memory);
  }

  void begin_step() {
    const Action action = action_of(step);
    if (action != Action::kNothing && !prepared) {
      kineto::prepareProfiler(config(), activities);
      prepared = true;
    }
    if (action == Action::kRecord && !records) {
      kineto::enableProfiler(config(), activities);
      kineto::addMetadataJson("distributedInfo", cat("{\"rank\": ", rank, "}"));
      records = true;
      first_step = step;
    }
    if (records) span.emplace([&] { return cat("ProfilerStep#", step); });
  }
  void end_step() { span.reset(); }

  void end_window() {
    if (!records) {
      if (std::exchange(prepared, false)) {  // Kineto ends what it has prepared by a recording alone
        kineto::enableProfiler(config(), activities);
        kineto::disableProfiler();
      }
      return;
    }
    span.reset();
    records = prepared = false;
    auto trace = std::make_unique<Trace::Impl>();
    trace->result = kineto::disableProfiler();
    trace->first_step = first_step;
    trace->rank = rank;
    Trace ready(std::move(trace));
    if (options.on_trace_ready) options.on_trace_ready(ready);
  }
  void require_thread(const char* call) const {
    require(std::this_thread::get_id() == thread, "Profiler::", call, "() was called on thread ",
            std::this_thread::get_id(), ": expected thread ", thread, ", which made the profiler");
  }

  const ProfileOptions options;
  const std::set<ActivityType> activities;
  const std::thread::id thread = std::this_thread::get_id();
  const int rank = options.rank.value_or(rank_of_environment());
  int64_t step = 0;
  int64_t first_step = 0;
  bool prepared = false;
  bool records = false;
  bool ended = false;
  std::optional<TraceSpan> span;
};

Profiler::Profiler(ProfileOptions options) {
  const TraceSchedule& s = options.schedule;
  require(s.wait >= 0 && s.warmup >= 0 && s.active >= 0 && s.repeat >= 0,
          "profile(): expected a schedule of numbers from 0 on, found wait ", s.wait, ", warmup ", s.warmup,
          ", active ", s.active, ", repeat ", s.repeat);
  require(!is_profiled().exchange(true), "profile(): another profiler runs in this process, and LibTorch has one for ",
          "all threads; expected the end of that one first. Where ranks are threads, let one of them profile");
  try {
    impl_ = std::make_unique<Impl>(std::move(options));
    impl_->begin_step();
  } catch (...) {
    is_profiled() = false;
    throw;
  }
}

Profiler::Profiler(Profiler&&) noexcept = default;

Profiler::~Profiler() {
  if (!impl_) return;
  try {
    stop();
  } catch (const std::exception& error) {
    log::error("profile(): ", error.what());
  }
}

void Profiler::step() {
  Impl& impl = *impl_;
  if (impl.ended) return;
  impl.require_thread("step");
  impl.end_step();
  ++impl.step;
  if (impl.window_ends(impl.step)) impl.end_window();
  impl.begin_step();
}

void Profiler::stop() {
  Impl& impl = *impl_;
  if (std::exchange(impl.ended, true)) return;
  try {
    impl.require_thread("stop");
    impl.end_window();
  } catch (...) {
    is_profiled() = false;
    throw;
  }
  is_profiled() = false;
}

Profiler profile(ProfileOptions options) { return Profiler(std::move(options)); }

std::function<void(Trace& trace)> write_traces(const std::string& folder) {
  return [folder](Trace& trace) {
    const std::string name = cat("rank_", trace.rank(), "_step_", trace.first_step(), ".json");
    trace.write((std::filesystem::path(folder) / name).string());
  };
}

}  // namespace ds::profiling
