#include "engine/setup/fp8_setup.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/listed.h"
#include "core/log.h"
#include "core/name_pattern.h"
#include "core/text_lines.h"
#include "layers/fp8/linear.h"
#include "model/state/tensor_parts.h"
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

// The names of each Linear layer of the model, on all stages of a pipeline.
using LayerNames = std::vector<std::vector<std::string>>;

std::string some_names(const LayerNames& layers) {
  constexpr size_t kMost = 5;
  std::string names;
  for (size_t i = 0; i < std::min(kMost, layers.size()); ++i) names += cat(i == 0 ? "" : ", ", layers[i].front());
  return layers.size() > kMost ? cat(names, " and ", layers.size() - kMost, " more") : names;
}

void require_used(const char* key, const std::vector<std::string>& patterns, const LayerNames& layers) {
  for (const std::string& pattern : patterns) {
    const bool used =
        std::any_of(layers.begin(), layers.end(), [&](const auto& names) { return matches_any({pattern}, names); });
    require<ConfigError>(used, key, ": expected \"", pattern, "\" to be the name of a Linear layer, or a pattern of ",
                         "some, found none among ", some_names(layers));
  }
}

bool is_chosen(const std::vector<std::string>& names, const config::Fp8Section& section) {
  return matches_any(section.modules, names) && !matches_any(section.exclude, names);
}

// Returns the names of the layers of all stages, those of a stage in the order of its module, each stage once.
// Collective over all ranks where there are several stages.
LayerNames names_of_stages(const ModelState& model, const std::vector<fp8::NamedLinear>& own) {
  LayerNames result;
  if (model.plan.topology.pipe == 1) {
    for (const fp8::NamedLinear& layer : own) result.push_back(layer.names);
    return result;
  }
  std::string text;
  if (model.ranks.layer_ranks().rank() == 0) {
    for (const fp8::NamedLinear& layer : own) {
      for (const std::string& name : layer.names) text += cat(name, '\t');
      text += '\n';
    }
  }
  const Ranks& ranks = model.ranks;
  for (const std::string& of_rank : comm::texts_of_ranks(text, ranks.device, *ranks.world, "Linear layers of stages")) {
    for (const std::string& line : text_lines(of_rank)) {
      std::vector<std::string>& names = result.emplace_back();
      for (size_t begin = 0, end = 0; (end = line.find('\t', begin)) != std::string::npos; begin = end + 1) {
        names.push_back(line.substr(begin, end - begin));
      }
    }
  }
  return result;
}

// Throws ConfigError for a chosen layer of two stages: it would have a history on each, of what that stage gives it.
void require_on_one_stage(const LayerNames& layers, const config::Fp8Section& section) {
  std::set<std::string> seen;
  for (const std::vector<std::string>& names : layers) {
    require<ConfigError>(seen.insert(names.front()).second || !is_chosen(names, section), "fp8: layer ", names.front(),
                         ": expected a Linear layer of one stage, found one whose weight several stages of the ",
                         "pipeline share; leave it out (\"fp8\": {\"exclude\": [\"", names.front(), "\"]})");
  }
}

// Returns the layers of this rank that compute on FP8.
std::vector<fp8::NamedLinear> chosen_layers(torch::nn::Module& module, const config::Fp8Section& section) {
  std::vector<fp8::NamedLinear> layers = fp8::linears_of(module);
  std::erase_if(layers, [&](const fp8::NamedLinear& layer) { return !is_chosen(layer.names, section); });
  // A rank multiplies with its part of a weight that is split: products are of the leaf.
  for (fp8::NamedLinear& layer : layers) layer.weight = trained_tensor(layer.weight);
  return layers;
}

// Throws ConfigError on all ranks where the section does not fit the layers. Collective as names_of_stages().
void require_choice(const ModelState& model, const config::Fp8Section& section) {
  const LayerNames layers = names_of_stages(model, fp8::linears_of(*model.module));
  require<ConfigError>(!layers.empty(), "fp8.enabled: expected Linear layers in the model, found none; turn it off");
  require_used("fp8.modules", section.modules, layers);
  require_used("fp8.exclude", section.exclude, layers);
  const bool any = std::any_of(layers.begin(), layers.end(), [&](const auto& one) { return is_chosen(one, section); });
  require<ConfigError>(any, "fp8.exclude: expected it to leave a layer, found none; turn fp8 off");
  require_on_one_stage(layers, section);
}

// Calls `check`, and makes what it throws a failure of all ranks where these have other layers, or other parts of them.
void check_on_all_ranks(const ModelState& model, const std::function<void()>& check) {
  const Topology& topology = model.plan.topology;
  if (topology.pipe == 1 && topology.tensor == 1) return check();
  std::exception_ptr failure;
  try {
    check();
  } catch (const ConfigError&) {
    failure = std::current_exception();
  }
  const auto other = comm::failure_of_ranks(failure, model.ranks.device, *model.ranks.world);
  require<ConfigError>(!other, "rank ", other ? other->rank : 0, ": ", other ? other->message : std::string());
}

void require_dtype(const fp8::NamedLinear& layer) {
  const at::ScalarType type = layer.weight.scalar_type();
  require<ConfigError>(type == at::kBFloat16 || type == at::kHalf || type == at::kFloat, "fp8: layer ", layer.name(),
                       ": expected a weight of bfloat16, float16 or float32, found ", c10::toString(type),
                       "; leave it out (fp8.exclude)");
}

void require_sizes(const fp8::NamedLinear& layer, int64_t multiple, bool of_part) {
  const int64_t in = layer.inputs();
  const int64_t out = layer.outputs();
  require<ConfigError>(in % multiple == 0 && out % multiple == 0, "fp8: layer ", layer.name(),
                       ": expected in_features and out_features that are multiples of ", multiple,
                       of_part ? " in the part of each rank of the tensor axis, found " : ", found ", in, " and ", out,
                       "; leave it out (\"fp8\": {\"exclude\": [\"", layer.name(), "\"]}), or pad it");
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

// Says which projections stay as they are: MultiheadAttention has them in one matrix, of which it multiplies with
// parts.
void tell_of_attention(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.key().ends_with("in_proj_weight")) names.push_back(item.key());
  }
  if (names.empty()) return;
  log::info("fp8: ", listed(names, 5),
            ": the projection of MultiheadAttention's inputs is no Linear layer and stays as ",
            "it is; Linear layers in its place, as other attentions have them, are on FP8");
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
  const bool blocks = section.granularity == config::Fp8Granularity::kBlock;
  if (!section.emulate) require_hardware(model.ranks.device, blocks);
  require_choice(model, section);
  const int64_t block_sizes = section.emulate ? fp8::kBlock : kBlockSizesOnDevice;
  check_on_all_ranks(model, [&] {
    for (const fp8::NamedLinear& layer : chosen_layers(*model.module, section)) {
      require_sizes(layer, blocks ? block_sizes : kTensorSizes, model.plan.topology.tensor > 1);
    }
  });
}

void set_up_fp8(ModelState& model, const config::Fp8Section& section) {
  const std::vector<fp8::NamedLinear> layers = chosen_layers(*model.module, section);
  check_on_all_ranks(model, [&] {
    for (const fp8::NamedLinear& layer : layers) require_dtype(layer);
  });
  std::vector<std::string> names;
  for (const fp8::NamedLinear& layer : layers) names.push_back(layer.name());
  model.fp8 = std::make_shared<fp8::Scaling>(scaling_options(section), std::move(names), model.ranks.device);
  if (model.tensor) {
    std::vector<char> parts;
    for (const fp8::NamedLinear& layer : layers) {
      const auto has_leaf = [&](const auto& split) { return split.leaf.is_same(layer.weight); };
      parts.push_back(std::any_of(model.tensor->parameters.begin(), model.tensor->parameters.end(), has_leaf) ? 1 : 0);
    }
    model.fp8->share_parts(model.tensor->ranks, std::move(parts));
  }
  fp8::set_layers(layers, model.fp8);
  tell_of_attention(*model.module);
}

}  // namespace ds::engine
