#include "model/checkpoint/checkpoint_fit.h"

#include <algorithm>
#include <set>

#include "checkpoint/module_weights.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/listed.h"
#include "core/log.h"
#include "model/checkpoint/rank_state.h"

namespace ds::engine {
namespace {

constexpr size_t kMostListed = 8;  // names in a message

// "h.0.b" of "weights/h.0.b".
std::string name_of(const std::string& path) { return path.substr(path.find('/') + 1); }

}  // namespace

CheckpointFit::CheckpointFit(const ModelState& model, checkpoint::Source& source, const FitOptions& options)
    : model_(model),
      source_(source),
      same_ranks_(source.state().world_size == model.ranks.world->size() &&
                  source.state().pipeline_stages == model.pipeline_ranks() &&
                  source.state().tensor_ranks == model.ranks.tensor_ranks()) {
  find_weights(options);
  if (!options.with_states) return;
  if (model.optimizer.own) {
    require_states(options.hints);
    require_own_states_only(options.hints);
  } else if (model.optimizer.client) {
    require_client_optimizer(model, source);
  }
}

std::string CheckpointFit::stored_name(const std::string& parameter) const {
  const auto found = weights_.find(parameter);
  return found == weights_.end() ? std::string() : checkpoint::name_in("weights/", found->second);
}

std::pair<std::string, std::vector<int64_t>> CheckpointFit::state_of(const std::string& kind,
                                                                     const Segment& segment) const {
  const auto index = static_cast<size_t>(segment.parameter);
  const std::string& path = weight(model_.parameters[index].name);
  if (path.empty()) return {};
  return {checkpoint::state_path(kind, checkpoint::name_in("weights/", path)), model_.parameters[index].whole_sizes()};
}

std::string CheckpointFit::average(const zero::Parameter& parameter) const {
  const std::string name = stored_name(parameter.name);
  std::string path = checkpoint::ema_path(name);
  if (name.empty() || !source_.contains(path)) return {};
  const std::vector<int64_t> sizes = parameter.whole_sizes();
  require(source_.info(path).sizes == sizes, source_.location(), ": load_checkpoint: \"", path, "\": expected shape ",
          c10::IntArrayRef(sizes), ", found ", c10::IntArrayRef(source_.info(path).sizes));
  return path;
}

void CheckpointFit::find_weights(const FitOptions& options) {
  std::map<const void*, std::vector<std::string>> names;
  for (const auto& item : model_.module->named_parameters()) {
    names[trained_tensor(item.value()).unsafeGetTensorImpl()].push_back(item.key());
  }
  Shapes wanted;
  const auto add = [&](const zero::Parameter& parameter) {
    const std::vector<int64_t> sizes = parameter.whole_sizes();
    const std::vector<std::string>& all = names.at(parameter.tensor.unsafeGetTensorImpl());
    const std::string path = checkpoint::weight_for(source_, all);
    weights_[parameter.name] = path;
    wanted[path.empty() ? checkpoint::weight_path(parameter.name) : path] = sizes;
    checkpoint::add_stored_names(source_, all, sizes, wanted);
    require(!path.empty() || !options.all_weights, source_.location(), ": load_checkpoint: \"", parameter.name,
            "\" is missing, and what the model has is of a load or a step that failed part of the way; ",
            "load a checkpoint that has all weights");
  };
  for (const zero::Parameter& parameter : model_.parameters) add(parameter);
  for (const zero::Parameter& parameter : model_.frozen) add(parameter);
  add_buffers(wanted);
  add_other_stages(wanted);
  checkpoint::require_shapes(source_, wanted);
  const checkpoint::Difference differs = checkpoint::difference(source_, wanted);
  for (const std::string& path : differs.missing) report_.missing.push_back(name_of(path));
  for (const std::string& path : differs.unused) report_.unused.push_back(name_of(path));
  if (options.over) return require_over(options, wanted);
  require(!options.strict || differs.empty(), source_.location(),
          ": load_checkpoint: the checkpoint does not fit the model: ", differs.text(), ". ", options.hints.less);
  if (!differs.empty() && model_.ranks.world->rank() == 0) {
    log::warning("load_checkpoint: ", source_.location(), ": ", differs.text(), " (load_module_strict is false)");
  }
}

// What the source lacks stays; it has something of the model, also of another stage, and nothing else if strict.
void CheckpointFit::require_over(const FitOptions& options, const Shapes& wanted) const {
  const bool any =
      std::any_of(wanted.begin(), wanted.end(), [&](const auto& one) { return source_.contains(one.first); });
  const bool fits = report_.unused.empty() && any;
  const std::string advice = any ? "Pass strict = false to load the others"
                                 : cat("Expected some of the model's tensors, such as ", listed(report_.missing, 1));
  const std::string found =
      cat(report_.unused.size(), " tensors that the model does not have: ", listed(report_.unused, kMostListed));
  require(fits || (!options.strict && any), source_.location(), ": load_weights: found ", found, ". ", advice);
  if (!fits && model_.ranks.world->rank() == 0) {
    log::warning("load_weights: ", source_.location(), ": ", found, " (strict is false)");
  }
}

void CheckpointFit::add_buffers(Shapes& wanted) const {
  for (const auto& item : model_.module->named_buffers()) {
    const std::string path = buffer_for(source_, model_.ranks.world->rank(), same_ranks_, item.key());
    wanted[path.empty() ? checkpoint::buffer_path(item.key()) : path] = item.value().sizes().vec();
    // Its own one stands for the common one.
    if (path.starts_with("ranks/")) wanted[checkpoint::buffer_path(item.key())] = item.value().sizes().vec();
  }
}

// Adds what ranks of other pipeline stages look for.
void CheckpointFit::add_other_stages(Shapes& wanted) const {
  if (model_.pipeline_ranks() == 1) return;
  for (const auto& [path, tensor] : source_.tensors()) {
    for (const char* kind : {"weights/", "buffers/"}) {
      const std::string name = checkpoint::name_in(kind, path);
      if (!name.empty() && model_.pipeline->module->is_elsewhere(name)) wanted.emplace(path, tensor.sizes);
    }
  }
}

// Requires the states of an optimizer of ours.
void CheckpointFit::require_states(const FitHints& hints) const {
  const optimizers::SliceOptimizer& own = *model_.optimizer.own;
  require(source_.state().optimizer.has_value(), source_.location(), ": load_checkpoint: the checkpoint has no ",
          "optimizer states; ", hints.fresh_states, " to begin with fresh ones");
  const std::string& writer = source_.state().optimizer->type;
  if (writer != own.name() && model_.ranks.world->rank() == 0) {
    log::warning("load_checkpoint: ", source_.location(), ": written by ", writer, ", goes on with ", own.name());
  }
  for (size_t b = 0; b < model_.buckets.size(); ++b) {
    for (const auto& [kind, values] : model_.optimizer.states(b)) {
      for (const Segment& segment : model_.buckets[b].layout().segments) {
        const auto& [path, sizes] = state_of(kind, segment);
        if (segment.length == 0 || path.empty()) continue;
        require(source_.contains(path) && source_.info(path).sizes == sizes, source_.location(),
                ": load_checkpoint: expected \"", path, "\" of shape ", c10::IntArrayRef(sizes), " for ", own.name(),
                ", found none: the checkpoint was written by ", writer, "; ", hints.fresh_states,
                " to begin with fresh states");
      }
    }
  }
}

void CheckpointFit::require_own_states_only(const FitHints& hints) const {
  if (model_.buckets.empty()) return;
  const std::string name = model_.optimizer.own->name();
  std::set<std::string> own;
  for (const auto& [state, values] : model_.optimizer.own->shared_states()) own.insert(state_of_parameter(state));
  for (size_t b = 0; b < model_.buckets.size(); ++b) {
    for (const auto& [kind, values] : model_.optimizer.states(b)) own.insert(kind);
  }
  for (const auto& [path, tensor] : source_.tensors()) {
    const std::string rest = checkpoint::name_in("optimizer/", path);
    require(rest.empty() || own.contains(rest.substr(0, rest.find('/'))), source_.location(),
            ": load_checkpoint: found \"", path, "\", which ", name, " does not have: the checkpoint was written by ",
            source_.state().optimizer->type, "; ", hints.fresh_states, " to begin with fresh states");
  }
}

}  // namespace ds::engine
