#include <torch/nn/module.h>

#include <algorithm>

#include "core/check.h"
#include "dsengine/profiling.h"
#include "profiling/flops_report.h"
#include "profiling/module_work.h"

namespace ds::profiling {

FlopsProfile profile_flops(const torch::nn::Module& model, const std::function<void()>& run,
                           const ProfileFlopsOptions& options) {
  require(run != nullptr, "profile_flops: expected a function that runs the model, found none");
  ModuleWork work(model);
  work.start();
  run();
  work.stop();
  FlopsProfile profile{.modules = work.rows(), .unknown_operators = work.unknown_operators()};
  const auto parameters = model.parameters();
  const bool on_host =
      std::all_of(parameters.begin(), parameters.end(), [](const at::Tensor& tensor) { return tensor.is_cpu(); });
  profile.text = flops_report(nullptr, profile, {.modules = options, .host_times = on_host});
  return profile;
}

}  // namespace ds::profiling
