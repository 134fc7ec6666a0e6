#include "engine/setup/fp8_setup.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/name_pattern.h"
#include "layers/fp8/linear.h"
#include "ops/device_kernels.h"

namespace ds::engine {
namespace {

constexpr int64_t kTensorSizes = 16;          // that sizes of cuBLAS' FP8 matrices are multiples of
constexpr int64_t kBlockSizesOnDevice = 512;  // with blocks: it reads their scales 16 bytes at a time
constexpr int kAda = 89;                      // compute capabilities: 10 * major + minor
constexpr int kHopper = 90;
constexpr int kAfterHopper = 100;

// Whether one of the patterns matches one of the names: a weight that several layers share has the names of all.
bool matches_any(const std::vector<std::string>& patterns, const std::vector<std::string>& names) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) {
    const NamePattern wanted = NamePattern::stars(pattern);
    return std::any_of(names.begin(), names.end(), [&](const auto& name) { return wanted.matches(name); });
  });
}

std::string some_names(const std::vector<fp8::NamedLinear>& layers) {
  constexpr size_t kMost = 5;
  std::string names;
  for (size_t i = 0; i < std::min(kMost, layers.size()); ++i) names += cat(i == 0 ? "" : ", ", layers[i].name());
  return layers.size() > kMost ? cat(names, " and ", layers.size() - kMost, " more") : names;
}

void require_used(const char* key, const std::vector<std::string>& patterns,
                  const std::vector<fp8::NamedLinear>& layers) {
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(layers.begin(), layers.end(),
                                  [&](const auto& layer) { return matches_any({pattern}, layer.names); });
    require<ConfigError>(used, key, ": expected \"", pattern, "\" to be the name of a Linear layer, or a pattern of ",
                         "some, found none among ", some_names(layers));
  }
}

std::vector<fp8::NamedLinear> chosen_layers(torch::nn::Module& module, const config::Fp8Section& section) {
  std::vector<fp8::NamedLinear> layers = fp8::linears_of(module);
  require<ConfigError>(!layers.empty(), "fp8.enabled: expected Linear layers in the model, found none; turn it off");
  require_used("fp8.modules", section.modules, layers);
  require_used("fp8.exclude", section.exclude, layers);
  std::erase_if(layers, [&](const fp8::NamedLinear& layer) {
    return !matches_any(section.modules, layer.names) || matches_any(section.exclude, layer.names);
  });
  require<ConfigError>(!layers.empty(), "fp8.exclude: expected it to leave a layer, found none; turn fp8 off");
  return layers;
}

void require_dtype(const fp8::NamedLinear& layer) {
  const at::ScalarType type = layer.weight.scalar_type();
  require<ConfigError>(type == at::kBFloat16 || type == at::kHalf || type == at::kFloat, "fp8: layer ", layer.name(),
                       ": expected a weight of bfloat16, float16 or float32, found ", c10::toString(type),
                       "; leave it out (fp8.exclude)");
}

void require_sizes(const fp8::NamedLinear& layer, int64_t multiple) {
  const int64_t in = layer.weight.size(1);
  const int64_t out = layer.weight.size(0);
  require<ConfigError>(in % multiple == 0 && out % multiple == 0, "fp8: layer ", layer.name(),
                       ": expected in_features and out_features that are multiples of ", multiple, ", found ", in,
                       " and ", out, "; leave it out (\"fp8\": {\"exclude\": [\"", layer.name(), "\"]}), or pad it");
}

void require_hardware(c10::Device device, bool blocks) {
  constexpr const char* kInstead = ", or, for tests, \"emulate\": true, which computes the same numbers slowly";
  require<ConfigError>(device.is_cuda(), "fp8.enabled: expected a GPU with FP8 (compute capability 8.9, 9.0 or ",
                       "newer), found the device ", device.str(), "; train on one, turn fp8 off", kInstead);
  const auto* const kernels = device_functions<ops::OpsDeviceKernels>();
  ensure(kernels != nullptr && kernels->compute_capability != nullptr, "a CUDA device comes with libdsengine_cuda");
  const int found = kernels->compute_capability(device.index());
  const std::string name = cat(found / 10, ".", found % 10);
  require<ConfigError>(found >= kAda, "fp8.enabled: expected a GPU of compute capability 8.9 or newer, found ", name,
                       " (", device.str(), "); turn fp8 off", kInstead);
  require<ConfigError>(!blocks || (found >= kHopper && found < kAfterHopper), "fp8.granularity: expected a GPU of ",
                       "compute capability 9.0 with \"block\", whose scales of 128 x 128 no other has, found ", name,
                       " (", device.str(), "); use \"tensor\"", kInstead);
}

fp8::ScalingOptions scaling_options(const config::Fp8Section& section) {
  return {.recipe = section.recipe == config::Fp8Recipe::kDelayed ? fp8::Recipe::kDelayed : fp8::Recipe::kCurrent,
          .blocks = section.granularity == config::Fp8Granularity::kBlock,
          .gradients = section.format == "hybrid" ? fp8::kE5M2 : fp8::kE4M3,
          .history = section.amax_history_len,
          .most_recent = section.amax_compute_algo == "most_recent",
          .margin = section.margin,
          .weight_gradients = section.fp8_wgrad,
          .arithmetic = section.emulate ? fp8::Arithmetic::kEmulated : fp8::Arithmetic::kHardware};
}

}  // namespace

void require_fp8(const ModelState& model, const config::Fp8Section& section) {
  const Topology& topology = model.plan.topology;
  require<ConfigError>(topology.pipe == 1 && topology.tensor == 1, "fp8.enabled: expected neither a pipeline of ",
                       "several stages nor a tensor axis, found ", topology.tensor > 1 ? "a tensor axis" : "a pipeline",
                       "; turn fp8 off");
  const bool blocks = section.granularity == config::Fp8Granularity::kBlock;
  if (!section.emulate) require_hardware(model.ranks.device, blocks);
  const int64_t block_sizes = section.emulate ? fp8::kBlock : kBlockSizesOnDevice;
  for (const fp8::NamedLinear& layer : chosen_layers(*model.module, section)) {
    require_sizes(layer, blocks ? block_sizes : kTensorSizes);
  }
}

void set_up_fp8(ModelState& model, const config::Fp8Section& section) {
  const std::vector<fp8::NamedLinear> layers = chosen_layers(*model.module, section);
  std::vector<std::string> names;
  for (const fp8::NamedLinear& layer : layers) {
    require_dtype(layer);
    names.push_back(layer.name());
  }
  model.fp8 = std::make_shared<fp8::Scaling>(scaling_options(section), std::move(names), model.ranks.device);
  fp8::set_layers(layers, model.fp8);
}

}  // namespace ds::engine
