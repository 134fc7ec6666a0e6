#include "model/state/recomputed_modules.h"

#include <exception>
#include <memory>
#include <string>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/name_pattern.h"
#include "core/without_stack.h"
#include "dsengine/module_checkpointing.h"
#include "recompute/modules/choose_modules.h"

namespace ds::engine {
namespace {

constexpr const char* kKey = "activation_checkpointing.modules";

int64_t count_matches(torch::nn::Module& module, const std::string& pattern) {
  const NamePattern named = NamePattern::regex(pattern);
  int64_t count = 0;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    if (item.value()->parameters().empty()) continue;  // a module is known by them
    count += named.matches(item.key()) ? 1 : 0;
  }
  return count;
}

// Chooses the modules in place of those that were chosen before, on whatever thread.
void choose(ModelState& model, const config::ActivationCheckpointingSection& section) {
  const ModulePredicate named = modules_named(section.modules);
  model.recomputed = std::make_shared<int>();
  recompute::choose_modules(
      *model.module,
      [&](const std::string& name, const torch::nn::Module& each) {
        return !each.parameters().empty() && named(name, each);
      },
      {.recompute = section.recompute == "all" ? Recompute::kEverything : Recompute::kPointwise}, model.recomputed);
}

}  // namespace

void choose_recomputed_modules(ModelState& model, const config::DsConfig& config) {
  const config::ActivationCheckpointingSection& section = config.activation_checkpointing;
  int64_t here = 0;
  for (const std::string& pattern : section.modules) {
    const int64_t own = count_matches(*model.module, pattern);
    here += own;
    const int64_t anywhere =
        model.plan.pipeline ? comm::largest_of_ranks(own, model.ranks.device, *model.ranks.world, kKey) : own;
    require<ConfigError>(anywhere > 0, kKey, ": \"", pattern,
                         "\": expected the whole name of a module with parameters, ", "found that it matches none of ",
                         model.module->named_modules("", false).size(), "; names are those of named_modules()");
  }
  if (section.modules.empty()) return;
  std::exception_ptr failure;
  try {
    if (here > 0) choose(model, section);
  } catch (const UsageError& error) {
    failure = std::make_exception_ptr(ConfigError(cat(kKey, ": ", without_stack(error.what()))));
  }
  if (!model.plan.pipeline) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const int failed = comm::failed_rank(failure, model.ranks.device, *model.ranks.world);
  require<ConfigError>(failed < 0, kKey, ": rank ", failed, " could not choose its modules; its error says why");
}

void recompute_on_this_thread(ModelState& model, const config::DsConfig& config) {
  if (model.recomputed) choose(model, config.activation_checkpointing);
}

}  // namespace ds::engine
