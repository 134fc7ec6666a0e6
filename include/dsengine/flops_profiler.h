// How many operations a model takes and where, in forward and backward: the flops profiler of DeepSpeed, of any
// unmodified torch::nn module (docs/flops_profiler.md).
//
//   const profiling::FlopsProfile profile = profiling::profile_flops(*model, [&] { model->forward(x).sum().backward();
//   }); std::cout << profile.text;
//
// An engine profiles one step by itself when its ds_config says so (flops_profiler.enabled), and logs the text or
// writes it to flops_profiler.output_file; engine::flops_profile(*engine) has the numbers.
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
}

namespace ds::profiling {

// A module with all that is in it. A multiply-accumulate (MAC) of a matrix product, a convolution or attention is two
// floating-point operations (flops), which also count normalisation, pointwise operators, softmax and pooling. Counted
// as LibTorch runs them, from the sizes of their inputs: attention counts all pairs, masked ones too.
struct ModuleFlops {
  std::string name;              // dotted; empty: the model
  std::string type;              // "Linear"
  int parent = -1;               // the index of the module that holds it; -1: none
  int depth = 0;                 // 0: the model
  int64_t parameters = 0;        // elements on this rank; those of several modules count in the first one
  int64_t macs = 0;              // of forward
  int64_t flops = 0;             // of forward
  int64_t backward_macs = 0;     // of gradients
  int64_t backward_flops = 0;    // of gradients
  int64_t recomputed_flops = 0;  // of forward, computed again in backward (activation checkpoints)
  double seconds = 0;            // of forward, by the host's clock; no time of a device
};

struct FlopsProfile {
  std::vector<ModuleFlops> modules;  // in the model's order, the model itself first
  // Operators that came from no library of LibTorch's and have no rule: they count as nothing.
  std::vector<std::string> unknown_operators;
  std::string text;  // a report with lines like those of DeepSpeed's
};

struct ProfileFlopsOptions {
  int64_t module_depth = -1;  // of modules among the largest ones; -1: the deepest
  int64_t top_modules = 1;    // so many types of modules at each depth
  bool detailed = true;       // and each module by itself
};

// Of what `run`, called once on this thread, computes with the model: operators of other threads, but autograd's, do
// not count. Throws what `run` throws, and UsageError where another 128 threads watch operators.
FlopsProfile profile_flops(const torch::nn::Module& model, const std::function<void()>& run,
                           const ProfileFlopsOptions& options = {});

}  // namespace ds::profiling

namespace ds::engine {

// Of one micro-batch of the step that the engine has profiled, on this rank; empty before its end. Throws UsageError
// without flops_profiler.enabled.
std::optional<profiling::FlopsProfile> flops_profile(Engine& engine);

}  // namespace ds::engine
