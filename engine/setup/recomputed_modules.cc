#include "engine/setup/recomputed_modules.h"

#include <regex>
#include <string>

#include "core/check.h"
#include "dsengine/module_checkpointing.h"
#include "engine/agreement/shared_failure.h"

namespace ds::engine {
namespace {

constexpr const char* kKey = "activation_checkpointing.modules";

int64_t count_matches(torch::nn::Module& module, const std::string& pattern) {
  const std::regex expression(pattern);
  int64_t count = 0;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    count += std::regex_match(item.key(), expression) ? 1 : 0;
  }
  return count;
}

}  // namespace

void choose_recomputed_modules(ModelState& model, const config::DsConfig& config) {
  const config::ActivationCheckpointingSection& section = config.activation_checkpointing;
  int64_t here = 0;
  for (const std::string& pattern : section.modules) {
    const int64_t own = count_matches(*model.module, pattern);
    here += own;
    const int64_t anywhere = model.pipeline ? largest_of_ranks(own, model.ranks.device, *model.ranks.world, kKey) : own;
    require<ConfigError>(anywhere > 0, kKey, ": \"", pattern, "\": expected the whole name of a module, found that it ",
                         "matches none of ", model.module->named_modules("", false).size(),
                         "; names are those of named_modules()");
  }
  if (here == 0) return;
  try {
    apply_activation_checkpointing(
        *model.module, modules_named(section.modules),
        {.recompute = section.recompute == "all" ? Recompute::kEverything : Recompute::kPointwise});
  } catch (const UsageError& error) {
    throw ConfigError(cat(kKey, ": ", error.what()));
  }
}

}  // namespace ds::engine
