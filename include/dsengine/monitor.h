// Monitors: where the curves of a run go, and values of a program's own in them. Torch-free.
//
//   engine->log("accuracy", correct.mean(), {.sync_dist = true});           // the mean over the ranks, step by step
//   engine->log("tokens", count, {.sync_dist = true, .reduce = engine::Reduce::kSum});
//   engine->log("val_loss", loss, {.sync_dist = true, .on_epoch = true});   // one point an epoch
//   engine::end_epoch(*engine);
//
// The engine adds its own values, one point a step: loss, learning rate, loss scale, gradient norm, rates, memory, MFU
// (docs/monitoring.md). The config chooses monitors: tensorboard, csv_monitor, and json_lines, openmetrics and mlflow
// of the section "metrics". A monitor of one's own is a class with one function:
//
//   struct Terminal : profiling::Monitor {
//     void write_events(const std::vector<profiling::Event>& events) override {
//       for (const auto& event : events) std::printf("%s %g\n", event.name.c_str(), event.value);
//     }
//   };
//   engine::add_monitor(*engine, std::make_unique<Terminal>());             // on all ranks
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ds::profiling {

// One point of a curve. `step` is its place on the x-axis: samples of all ranks since the run's first step, as in
// DeepSpeed, whose names the engine's own values have ("Train/Samples/lr").
struct Event {
  std::string name;
  double value = 0.0;
  int64_t step = 0;
};

// A destination for curves, which rank 0 alone writes to. Used on the engine's thread.
class Monitor {
 public:
  virtual ~Monitor() = default;
  // Appends and flushes. Steps of one name never go back within a run. Throws IoError where it cannot write, for
  // example when the disk is full: the engine then drops the monitor, logs the error, and trains on.
  virtual void write_events(const std::vector<Event>& events) = 0;
};

}  // namespace ds::profiling

namespace ds::engine {

class Engine;

// How several values of one name become one: those of the calls of a step or epoch, and then those of the ranks.
enum class Reduce { kMean, kSum, kMin, kMax };

// Options of Engine::log(). All calls of a name have the same ones.
struct LogOptions {
  // Whether the values of the data-parallel ranks are joined; all of them log the same names in the same order then.
  // False: rank 0's value is written, and the other ranks' are dropped.
  bool sync_dist = false;
  // A mean counts each call the same, and then each rank.
  Reduce reduce = Reduce::kMean;
  // Whether the name has one point an epoch, which end_epoch() writes, instead of one a step.
  bool on_epoch = false;

  bool operator==(const LogOptions&) const = default;
};

// What Engine::log() does. Calls before a step() belong to that step, and to its place on the x-axis. A value is one
// number, of any real type and on any device (else UsageError), and is taken over at once: it may be changed
// afterwards. Nothing waits for a device and nothing is sent in the call. Both happen when values are written: every
// steps_per_print steps (10 where that is null) and in end_epoch(). One collective over the data-parallel group joins
// all of them, after one that compares the names. Ranks that have logged other names get a UsageError with the lists of
// all ranks. Without a monitor values are dropped at once. UsageError for an empty name, one of the engine's own, and
// one with other options than before.

// Writes the values of all calls since the last writing, and the points of names with on_epoch. Collective over
// data-parallel ranks where there are monitors. Values that were logged after the last writing are lost when the engine
// ends: call it at the end of a run, too. On a GPU it waits for the values.
void end_epoch(Engine& engine);

// Adds a monitor to those of the config. All ranks call it, between steps; rank 0 writes to its own, and other ranks
// may give null (UsageError on rank 0).
void add_monitor(Engine& engine, std::unique_ptr<profiling::Monitor> monitor);

}  // namespace ds::engine
