// A sharded module in a checkpoint, by the engine's code: one format, any number of ranks, any stage.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/order/call_order.h"
#include "core/check.h"
#include "dsengine/config.h"
#include "loops/optimizer_states.h"
#include "loops/sharded_state.h"
#include "model/checkpoint/load_checkpoint.h"
#include "model/checkpoint/run_state.h"
#include "model/checkpoint/save_checkpoint.h"
#include "optim/client_states.h"
#include "optim/shard_optimizer.h"

namespace ds::loops {
namespace {

// A run without counters, schedule and loader: these are the program's.
struct NoRun {
  NoRun() { config.zero_optimization.stage = 3; }
  engine::config::DsConfig config;
  engine::Progress progress;
  std::optional<optimizers::LossScaler> loss_scaler;

  engine::RunState state() { return {.config = config, .progress = progress, .loss_scaler = loss_scaler}; }
};

// An optimizer's states in the form that checkpoints have: an element for each of the bucket's, zeros where the
// optimizer has no parameter.
class StatesForFiles final : public optimizers::SliceOptimizer {
 public:
  // `reads`: what the optimizer has; else zeros, which a checkpoint is read into.
  StatesForFiles(const OptimizerStates& states, bool reads)
      : SliceOptimizer(std::vector<optimizers::GroupOptions>(states.optimizer().param_groups().size())),
        name_(optimizers::client_name(states.optimizer())),
        masters_(states.model().state().masters),
        states_(masters_.size()) {
    const std::vector<LeafStates> all = reads ? states.read() : states.leaves();
    for (const LeafStates& one : all) {
      for (const std::string& name : one.kind->names) copy(one, name);
    }
    set_step_count(steps_of(all, states.call()));
  }

  void update(int64_t /*index*/, const at::Tensor& /*gradient*/, double /*gradient_scale*/) override {
    throw InternalError("states of a file have no step");
  }
  optimizers::NamedStates states(int64_t index) override { return states_[static_cast<size_t>(index)]; }
  at::Tensor weights(int64_t index) override { return masters_[static_cast<size_t>(index)]; }
  optimizers::OptimizerTraits traits() const override { return {}; }  // no states stay
  std::string name() const override { return name_; }

  // The contents that a checkpoint has brought.
  void give_to(const OptimizerStates& states) const {
    for (LeafStates& one : states.leaves()) {
      one.steps = step_count();
      for (const std::string& name : one.kind->names) {
        for (const auto& [own, flat] : states_[one.leaf->bucket]) {
          if (own == name) one.tensors.emplace_back(name, part_of(flat, one));
        }
      }
      states.give(one);
    }
  }

 protected:
  void allocate_states(int64_t /*index*/, const optimizers::NewState& /*new_state*/) override {}

 private:
  static at::Tensor part_of(const at::Tensor& flat, const LeafStates& one) {
    return flat.narrow(0, one.leaf->place.slice_offset, one.leaf->place.length);
  }

  void copy(const LeafStates& one, const std::string& name) {
    optimizers::NamedStates& own = states_[one.leaf->bucket];
    auto place = std::find_if(own.begin(), own.end(), [&](const auto& other) { return other.first == name; });
    if (place == own.end()) {
      own.emplace_back(name, at::zeros_like(masters_[one.leaf->bucket].detach()));
      place = own.end() - 1;
    }
    for (const auto& [given, values] : one.tensors) {
      if (given == name) part_of(place->second, one).copy_(values);
    }
  }

  // A checkpoint has one number.
  static int64_t steps_of(const std::vector<LeafStates>& all, const char* call) {
    const LeafStates* first = nullptr;
    for (const LeafStates& one : all) {
      if (!one.kind->prototype) continue;
      require(!first || first->steps == one.steps, call, ": expected states of one number of steps, found ",
              first ? first->steps : 0, " of ", first ? first->leaf->name : "", " and ", one.steps, " of ",
              one.leaf->name, ", which had no gradient in some; a checkpoint counts them together. Keep it with ",
              "sharded_optim_state_dict()");
      if (!first) first = &one;
    }
    return first ? first->steps : 0;
  }

  std::string name_;
  std::vector<at::Tensor> masters_;
  std::vector<optimizers::NamedStates> states_;  // by bucket
};

// The model's optimizer, as the engine's checkpoints know one, while this lives.
class WithOptimizer {
 public:
  WithOptimizer(ShardedModel& model, torch::optim::Optimizer* optimizer, bool saves) : model_(model) {
    if (!optimizer) return;
    const char* const call = saves ? "save" : "load";
    states_.emplace(model, *optimizer, call);
    const size_t own = states_->leaves().size();
    require(own == model.leaves().size(), call, ": expected an optimizer over all of sharded->parameters(), which are ",
            model.leaves().size(), ", found one over ", own,
            ": a checkpoint has the states of one optimizer for the whole model. Keep those of several with ",
            "sharded_optim_state_dict(), and ", call, " the model without them");
    own_ = std::make_shared<StatesForFiles>(*states_, saves);
    model.set_optimizer({.own = own_, .client = {std::shared_ptr<void>(), optimizer}, .client_states = nullptr});
  }
  ~WithOptimizer() { model_.set_optimizer({}); }
  WithOptimizer(const WithOptimizer&) = delete;
  WithOptimizer& operator=(const WithOptimizer&) = delete;
  void take() const {
    if (own_) own_->give_to(*states_);
  }

 private:
  ShardedModel& model_;
  std::optional<OptimizerStates> states_;
  std::shared_ptr<StatesForFiles> own_;
};

}  // namespace

std::string save_state(ShardedModel& model, const std::string& folder, const std::string& tag,
                       torch::optim::Optimizer* optimizer) {
  require(!tag.empty(), "save: expected a tag, the name of the folder in ", folder, ", found none; \"step100\", say");
  const at::NoGradGuard no_grad;
  const WithOptimizer with(model, optimizer, /*saves=*/true);
  NoRun run;
  engine::Saves saves;
  return engine::save_checkpoint(model.state(), run.state(), saves, {.save_dir = folder, .tag = tag, .options = {}});
}

void load_state(ShardedModel& model, const std::string& folder, const std::string& tag,
                torch::optim::Optimizer* optimizer) {
  const at::NoGradGuard no_grad;
  model.gathers().reshard_all();  // full parameters still have the values of before
  const WithOptimizer with(model, optimizer, /*saves=*/false);
  NoRun run;
  engine::ModelConsistency consistency;
  const engine::LoadedCheckpoint loaded =
      engine::load_checkpoint(model.state(), run.state(), consistency,
                              {.load_dir = folder,
                               .tag = tag,
                               .options = {.load_module_only = optimizer == nullptr},
                               .hints = {.fresh_states = "load(folder, tag) without the optimizer",
                                         .less = "Load it into a module with the same parameters and buffers"}});
  require<IoError>(static_cast<bool>(loaded), "load: expected a checkpoint in ", folder, ", found none");
  with.take();
}

}  // namespace ds::loops
