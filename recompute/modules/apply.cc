#include <torch/nn/module.h>

#include <algorithm>
#include <memory>

#include "core/check.h"
#include "core/name_pattern.h"
#include "dsengine/module_checkpointing.h"
#include "recompute/modules/choose_modules.h"
#include "recompute/modules/module_watch.h"

namespace ds {
namespace {

bool is_inside(const std::string& name, const std::string& outer) {
  return outer.empty() ? !name.empty() : name.starts_with(outer + ".");
}

}  // namespace

ModulePredicate modules_named(const std::vector<std::string>& patterns) {
  std::vector<NamePattern> wanted;
  for (const std::string& pattern : patterns) {
    const std::string reason = regex_problem(pattern);
    require(reason.empty(), "modules_named: \"", pattern,
            "\": expected a regular expression, found one that cannot be ", "read (", reason,
            "); dots of names are written \\.");
    wanted.push_back(NamePattern::regex(pattern));
  }
  return [wanted](const std::string& name, const torch::nn::Module& /*module*/) {
    return std::any_of(wanted.begin(), wanted.end(), [&](const NamePattern& pattern) { return pattern.matches(name); });
  };
}

std::vector<std::string> recompute::choose_modules(torch::nn::Module& module, const ModulePredicate& predicate,
                                                   const ModuleCheckpointOptions& options,
                                                   const std::shared_ptr<const void>& owner) {
  require(predicate != nullptr,
          "apply_activation_checkpointing: expected a predicate that chooses modules, found none; ",
          "modules_named({\"layers\\\\.\\\\d+\"}) chooses by names");
  std::vector<recompute::ChosenModule> chosen;
  std::vector<std::string> names;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const bool belongs =
        std::any_of(names.begin(), names.end(), [&](const std::string& outer) { return is_inside(item.key(), outer); });
    if (belongs || !predicate(item.key(), *item.value())) continue;
    require(!item.value()->parameters().empty(), "apply_activation_checkpointing: module \"", item.key(),
            "\": expected parameters, by which the operators of a module are known, found none; choose the module ",
            "around it");
    names.push_back(item.key());
    chosen.push_back({item.key(), item.value()});
  }
  require(!chosen.empty(), "apply_activation_checkpointing: expected the predicate to choose a module, found that it ",
          "chooses none of ", module.modules().size(), "; patterns match whole names, as named_modules() gives them");
  recompute::require_watchable();
  recompute::watch_modules(chosen, options, owner);
  return names;
}

std::vector<std::string> apply_activation_checkpointing(torch::nn::Module& module, const ModulePredicate& predicate,
                                                        const ModuleCheckpointOptions& options) {
  return recompute::choose_modules(module, predicate, options, /*owner=*/nullptr);
}

void remove_activation_checkpointing(torch::nn::Module& module) { recompute::forget_parameters(module); }

ModuleCheckpointStatistics take_module_checkpoint_statistics() { return recompute::take_watch_statistics(); }

}  // namespace ds
