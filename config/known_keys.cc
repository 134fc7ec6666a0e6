// The list of all keys, derived from the describe() functions of the sections. A new key needs nothing here; a new
// section that is a std::optional gets a line in known_keys().
#include <algorithm>
#include <memory>
#include <utility>

#include "config/describe.h"
#include "config/supported.h"
#include "core/check.h"
#include "dsengine/config.h"

namespace ds::engine::config {
namespace {

void append_paths(const std::string& prefix, const nlohmann::ordered_json& object, std::vector<std::string>& paths) {
  for (const auto& [key, value] : object.items()) {
    paths.push_back(prefix + key);
    if (value.is_object()) append_paths(prefix + key + ".", value, paths);
  }
}

}  // namespace

std::vector<std::string> known_keys() {
  DsConfig config;
  config.zero_optimization.offload_param.emplace();
  config.zero_optimization.offload_optimizer.emplace();
  config.zero_optimization.zenflow.emplace();
  config.zero_optimization.zeropp_loco_param.emplace();
  config.checkpoint.writer.emplace();
  config.sparse_attention.emplace();
  SectionsWithoutEffect without_effect;
  without_effect.weight_quantization.emplace();
  config.without_effect = std::make_shared<const SectionsWithoutEffect>(std::move(without_effect));
  std::vector<std::string> paths;
  append_paths("", to_json(config), paths);
  for (const std::string& type : optimizer_types()) {
    for (const std::string& name : optimizer_parameters(type)) paths.push_back(cat("optimizer.params.", name));
  }
  for (const std::string& type : scheduler_types()) {
    for (const std::string& name : scheduler_parameters(type)) paths.push_back(cat("scheduler.params.", name));
  }
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  return paths;
}

}  // namespace ds::engine::config
