// Traces of what a program does: LibTorch's profiler (Kineto) for C++, with torch.profiler's words. docs/trace.md.
//
//   auto profiler = profiling::profile({.schedule = {.wait = 1, .warmup = 1, .active = 3, .repeat = 1},
//                                       .on_trace_ready = profiling::write_traces("traces")});
//   for (auto& batch : *loader) {
//     ... engine->backward(loss); engine->step();
//     profiler.step();
//   }
//
// A trace has every operator of LibTorch on the thread that profiles and on autograd's threads, kernels of a GPU, and
// spans of the engine: its phases ("dsengine: backward"), collectives with label, group and bytes, gathers, releases,
// actions of a pipeline. `ds-tool trace merge` joins the files of all ranks. The section "trace" of a ds_config does
// the same without a line of code.
//
// One profiler at a time in a process (Kineto has one); all its calls come from the thread that made it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ds::profiling {

// What a trace records: the host's operators, and kernels and copies of a GPU.
enum class Activity { kCpu, kCuda };

// Which steps are recorded: after `wait` steps and `warmup` further ones, in which the profiler is made ready, `active`
// ones are recorded into one trace; all of it `repeat` times, 0: until the end. active = 0: one trace of everything
// until stop().
struct TraceSchedule {
  int64_t wait = 0;
  int64_t warmup = 0;
  int64_t active = 0;
  int64_t repeat = 0;
};

// The calls of one name in a trace, in milliseconds.
struct OperatorTimes {
  std::string name;
  int64_t calls = 0;
  double self_ms = 0;    // on the host, without what it calls
  double total_ms = 0;   // on the host, with what it calls
  double device_ms = 0;  // of kernels of this name
};

// One recorded window.
class Trace {
 public:
  ~Trace();
  Trace(Trace&&) noexcept;
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  int64_t first_step() const;  // the number of the first step in it, from 0
  int rank() const;
  // The times by name, the largest time of their own first, that on a device counted before that on the host.
  std::vector<OperatorTimes> key_averages() const;
  // The same as a table, at most so many rows.
  std::string table(size_t rows = 20) const;
  // Writes the trace-event format that Perfetto (ui.perfetto.dev) and chrome://tracing read. Once in the life of a
  // trace (else UsageError); missing folders are made. Throws IoError where it cannot be written.
  void write(const std::string& path);

 private:
  friend class Profiler;
  struct Impl;
  explicit Trace(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Options of profile(). torch.profiler's with_stack has no place here: a C++ program has no Python stack.
struct ProfileOptions {
  std::vector<Activity> activities;  // empty: the host, and the GPU where LibTorch sees one
  TraceSchedule schedule;
  std::function<void(Trace& trace)> on_trace_ready;  // called in step() or stop() at the end of each window
  bool record_shapes = false;                        // sizes and types of inputs, in the trace's arguments
  bool profile_memory = false;                       // events of memory that is taken and given back
  // The number of this process in the trace; empty: the environment's RANK, else 0.
  std::optional<int> rank;
};

// A running profile. Its destructor ends it as stop() does, and logs what on_trace_ready throws.
class Profiler {
 public:
  // Throws UsageError while another one runs in this process, and for a negative number in the schedule.
  explicit Profiler(ProfileOptions options);
  ~Profiler();
  Profiler(Profiler&&) noexcept;
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // A step of the program is over. In a recorded window each step is a span "ProfilerStep#N". Throws what
  // on_trace_ready throws, and UsageError on another thread.
  void step();
  // Ends a window that is open, and the profile. Calls after it do nothing.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Begins a profile: the first window, where the schedule does not wait.
[[nodiscard]] Profiler profile(ProfileOptions options);

// Returns an on_trace_ready that writes folder/rank_R_step_N.json, for `ds-tool trace merge`.
std::function<void(Trace& trace)> write_traces(const std::string& folder);

}  // namespace ds::profiling
