// Where the time and the work of a run go: operations between ranks (DeepSpeed's comms logger), and floating-point
// operations of the model (its flops profiler). Torch-free.
//
//   engine::log_summary(*engine);                           // rank 0 logs what it has timed so far
//   engine::log_summary(*engine, /*show_straggler=*/true);  // and who waited for whom
//
//   const profiling::FlopsProfile profile =
//       profiling::profile_flops(*model, [&] { model->forward(x).sum().backward(); });
//   std::cout << profile.text;
//
// An engine does both by itself where its ds_config says so. With comms_logger.enabled it logs the table when it ends,
// unless the program has asked for it before (docs/communication.md). With flops_profiler.enabled it profiles one step,
// and logs the text or writes it to flops_profiler.output_file (docs/flops_profiler.md).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ds::engine {

class Engine;

// The operations of one kind, group and size on this rank, since initialize(). A time is from the launch, or from the
// end of the operation before it in its group where that is later, to the end on this rank: waiting for other ranks is
// part of it.
struct CommsStatistics {
  std::string operation;      // "all_reduce"; with comms_logger.debug "all_reduce | bucket 3"
  std::string group;          // "world", "data", ...
  std::vector<int> ranks;     // the ranks of the group, as the world counts them
  int64_t message_bytes = 0;  // bytes of the full tensor (all ranks' parts of all_gather and reduce_scatter together);
                              // -1: several sizes
  int64_t count = 0;          // operations that have ended
  double total_ms = 0;        // the sum of their times
  double average_ms = 0;      // over the latest 1024, without the shortest and the longest tenth, as in DeepSpeed
  double algbw_gbps = 0;  // 10^9 bits a second at the average time; all_reduce counts each byte twice, as in DeepSpeed
  double busbw_gbps = 0;  // nccl-tests' bus bandwidth: comparable with the speed of the slowest link
};

// Returns what this rank has timed. Waits for operations that the device was given. Throws UsageError without
// comms_logger.
std::vector<CommsStatistics> comms_statistics(Engine& engine);

// On rank 0 logs a table of what it has timed, and returns it; other ranks return nothing. With show_straggler, which
// is collective, the table also says how long ranks waited for one another: for each operation a rank's time is
// compared with the shortest one of its group, which is that of the rank that came last. Throws UsageError without
// comms_logger.
std::string log_summary(Engine& engine, bool show_straggler = false);

}  // namespace ds::engine

namespace ds::profiling {

// The work of one module with all that is in it. A multiply-accumulate (MAC) of a matrix product, a convolution or
// attention is two floating-point operations (flops); flops also count normalisation, pointwise operators, softmax and
// pooling. Operators are counted as LibTorch runs them, from the sizes of their inputs: attention counts all pairs,
// masked ones too.
struct ModuleFlops {
  std::string name;              // dotted; empty: the model
  std::string type;              // "Linear"
  int parent = -1;               // the index of the module that holds it; -1: none
  int depth = 0;                 // 0: the model
  int64_t parameters = 0;        // elements on this rank; a parameter of several modules counts in the first one
  int64_t macs = 0;              // forward
  int64_t flops = 0;             // forward
  int64_t backward_macs = 0;     // backward, for gradients
  int64_t backward_flops = 0;    // backward, for gradients
  int64_t recomputed_flops = 0;  // forward, computed again in backward (activation checkpoints)
  double seconds = 0;            // forward, by the host's clock; it does not wait for a device
};

// The result of profile_flops().
struct FlopsProfile {
  std::vector<ModuleFlops> modules;  // in the model's order, the model itself first
  // Operators that came from no library of LibTorch's and have no rule: they count as nothing.
  std::vector<std::string> unknown_operators;
  std::string text;  // a report with lines like those of DeepSpeed's
};

// Options of the report of profile_flops().
struct ProfileFlopsOptions {
  int64_t module_depth = -1;  // the largest types of modules are listed at each depth down to this one; -1: at all
  int64_t top_modules = 1;    // how many types are listed at a depth
  bool detailed = true;       // lists each module by itself, too
};

// Counts what `run`, called once on this thread, computes with the model: operators of other threads, but autograd's,
// do not count. Throws what `run` throws, and UsageError where another 128 threads watch operators.
FlopsProfile profile_flops(const torch::nn::Module& model, const std::function<void()>& run,
                           const ProfileFlopsOptions& options = {});

}  // namespace ds::profiling

namespace ds::engine {

// Returns the profile of one micro-batch of the step that the engine has profiled, on this rank; empty before that step
// has ended. Throws UsageError without flops_profiler.enabled.
std::optional<profiling::FlopsProfile> flops_profile(Engine& engine);

}  // namespace ds::engine
