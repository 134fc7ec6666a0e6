// Engine::load_checkpoint: every rank reads the parts of logical tensors that its own layout has.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "checkpoint/module_weights.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/weights.h"
#include "engine/agreement/shared_failure.h"
#include "engine/agreement/shared_text.h"
#include "engine/checkpoint/checkpoint_pieces.h"
#include "engine/checkpoint/rank_state.h"
#include "engine/data/distributed_sampler.h"
#include "engine/engine_impl.h"
#include "engine/state/autocast.h"

namespace ds::engine {
namespace {

using checkpoint::Source;

// What a rank met, worst last.
enum class Outcome : int64_t { kGood, kDamaged, kUnfit };

void read_flat(Source& source, const std::string& path, int64_t offset, const at::Tensor& flat) {
  if (flat.is_cpu()) return source.read(path, offset, flat);
  const at::Tensor values = at::empty(flat.sizes(), flat.options().device(at::kCPU));
  source.read(path, offset, values);
  at::Tensor(flat).copy_(values);
}

// One load from one source. Nothing is changed by the constructor, which throws UsageError where the checkpoint does
// not fit.
class Loading {
 public:
  Loading(Engine::Impl& impl, Source& source, const LoadOptions& options)
      : impl_(impl),
        source_(source),
        options_(options),
        with_optimizer_(!options.load_module_only && options.load_optimizer_states),
        same_ranks_(source.state().world_size == impl.world->size() &&
                    source.state().pipeline_stages == (impl.pipeline ? impl.pipeline->ranks->size() : 1)) {
    find_weights();
    if (with_optimizer_ && impl.optimizer) require_states();
    if (with_optimizer_ && impl.client_optimizer) require_client_optimizer(impl, source);
  }

  // No collective.
  void read() {
    for (size_t b = 0; b < impl_.buckets.size(); ++b) read_trained(b);
    for (size_t f = 0; f < impl_.frozen_buckets.size(); ++f) {
      if (impl_.frozen_buckets[f].bits() == 0) read_frozen_bucket(f);
    }
    if (!impl_.gatherer) read_frozen_parameters();
    for (const auto& item : impl_.module->named_buffers()) {
      const std::string path = buffer_for(source_, impl_.world->rank(), same_ranks_, item.key());
      if (!path.empty()) at::Tensor(item.value().detach()).copy_(source_.tensor(path));
    }
    if (!with_optimizer_) forget_own_steps();
    if (options_.load_module_only) return;
    if (with_optimizer_ && impl_.client_optimizer) load_client_optimizer(impl_, source_);
    if (with_optimizer_ && impl_.optimizer) read_optimizer_memory();
    if (impl_.reduction) read_compression_memory();
    load_generators(impl_, source_, same_ranks_);
  }

  // Encoded slices are made from whole buckets. Collective; returns what this rank met.
  std::exception_ptr read_encoded() {
    std::exception_ptr failure;
    for (size_t f = 0; f < impl_.frozen_buckets.size(); ++f) {
      const zero::ParameterBucket& bucket = impl_.frozen_buckets[f];
      if (bucket.bits() == 0) continue;
      const size_t b = impl_.buckets.size() + f;
      impl_.gatherer->gather(b);
      try {
        for (const zero::Parameter& parameter : bucket.parameters()) {
          const std::string& path = weights_.at(parameter.name);
          if (path.empty()) continue;
          const at::Tensor values = at::empty(parameter.tensor.sizes(), parameter.tensor.scalar_type());
          source_.read(path, 0, values);
          parameter.tensor.detach().copy_(values);
        }
        impl_.gatherer->keep_changes(b);
      } catch (...) {
        failure = std::current_exception();
        impl_.gatherer->forget_changes(b);
      }
      impl_.gatherer->drop(b);
    }
    return failure;
  }

  // All of it, or nothing where the checkpoint lacks a part or has one of another shape.
  bool read_memory(const NamedTensors& memory) {
    const bool fits = std::all_of(memory.begin(), memory.end(), [&](const auto& entry) {
      return source_.contains(entry.first) && source_.info(entry.first).sizes == entry.second.sizes();
    });
    if (!fits) return false;
    for (const auto& [path, values] : memory) read_flat(source_, path, 0, values);
    return true;
  }

  // What only other ranks, or another layout, have begins anew.
  void read_optimizer_memory() {
    const std::string missing = load_shared_optimizer_memory(impl_, source_, [&](const std::string& name) {
      const auto found = weights_.find(name);
      return found == weights_.end() ? std::string() : checkpoint::name_in("weights/", found->second);
    });
    if (!missing.empty() && impl_.communicator->rank() == 0) {
      log::warning("load_checkpoint: ", source_.location(), ": has no ", missing, ", which ", impl_.optimizer->name(),
                   " keeps for all ranks; what it has stays as it is");
    }
    const NamedTensors memory = optimizer_memory(impl_);
    has_rank_states_ = same_ranks_ && read_memory(memory);
    if (!has_rank_states_ && !memory.empty() && impl_.world->rank() == 0) {
      log::warning("load_checkpoint: ", source_.location(),
                   ": errors of the compression are of other ranks or another layout; they begin at 0");
    }
  }

  // What ranks remember of steps of their own and of compression belongs to the weights that have gone.
  void forget_own_steps() {
    if (impl_.optimizer) impl_.optimizer->states_changed(/*rank_states=*/false);
    if (impl_.reduction) impl_.reduction->forget();
  }

  void read_compression_memory() {
    const NamedTensors memory = compression_memory(impl_);
    if (with_optimizer_ && same_ranks_ && read_memory(memory)) return;
    impl_.reduction->forget();
    if (impl_.world->rank() == 0 && !memory.empty()) {
      log::info("load_checkpoint: ", source_.location(), ": gradient_compression begins without what it remembered: ",
                "the checkpoint has none for these ranks and buckets");
    }
  }

  // New parameters for operators. Collective.
  void publish() {
    for (size_t b = 0; b < impl_.buckets.size(); ++b) impl_.access->updated(b);
    // What ranks of a node keep of frozen ones is of the values before.
    for (size_t f = 0; f < impl_.frozen_buckets.size(); ++f) {
      if (impl_.frozen_buckets[f].sharded()) impl_.access->updated(impl_.buckets.size() + f);
    }
    impl_.access->end_update();
    impl_.access->wait_all();
    impl_.access->change_mode();
  }

  void take_counters() {
    if (options_.load_module_only) return;
    const checkpoint::TrainingState& state = source_.state();
    impl_.global_steps = state.global_steps;
    impl_.global_samples = state.global_samples;
    impl_.applied_steps = state.global_steps - state.skipped_steps;
    impl_.step_applied = false;
    impl_.gradient_norm.reset();
    impl_.micro_steps = state.micro_steps;
    if (impl_.loss_scaler && impl_.loss_scaler->dynamic() && state.loss_scaler) {
      impl_.loss_scaler->load(*state.loss_scaler);
    }
    if (with_optimizer_ && impl_.optimizer && state.optimizer) {
      take_groups(*state.optimizer);
      take_over_states();
    }
    if (impl_.schedule) {  // also where it stays: its values are those of the groups, not the checkpoint's
      const int64_t own = impl_.schedule->last_batch_iteration();
      impl_.schedule->load_last_batch_iteration(options_.load_lr_scheduler_states ? state.lr_iteration.value_or(own)
                                                                                  : own);
    }
    if (impl_.loader && state.data) take_position(*state.data);
  }

 private:
  void find_weights() {
    std::map<const void*, std::vector<std::string>> names;
    for (const auto& item : impl_.module->named_parameters()) {
      names[item.value().unsafeGetTensorImpl()].push_back(item.key());
    }
    std::map<std::string, std::vector<int64_t>> wanted;
    const auto add = [&](const zero::Parameter& parameter, const std::vector<int64_t>& sizes) {
      const std::vector<std::string>& all = names.at(parameter.tensor.unsafeGetTensorImpl());
      const std::string path = checkpoint::weight_for(source_, all);
      weights_[parameter.name] = path;
      wanted[path.empty() ? checkpoint::weight_path(parameter.name) : path] = sizes;
      checkpoint::add_stored_names(source_, all, sizes, wanted);
      require(!path.empty() || !(impl_.half_loaded || impl_.half_stepped), source_.location(), ": load_checkpoint: \"",
              parameter.name,
              "\" is missing, and what the model has is of a load or a step that failed part of the way; ",
              "load a checkpoint that has all weights");
    };
    for (size_t i = 0; i < impl_.parameters.size(); ++i) add(impl_.parameters[i], impl_.parameter_infos[i].sizes);
    for (const zero::Parameter& parameter : impl_.frozen) add(parameter, parameter.tensor.sizes().vec());
    for (const auto& item : impl_.module->named_buffers()) {
      const std::string path = buffer_for(source_, impl_.world->rank(), same_ranks_, item.key());
      wanted[path.empty() ? checkpoint::buffer_path(item.key()) : path] = item.value().sizes().vec();
      // Its own one stands for the common one.
      if (path.starts_with("ranks/")) wanted[checkpoint::buffer_path(item.key())] = item.value().sizes().vec();
    }
    add_other_stages(wanted);
    checkpoint::require_shapes(source_, wanted);
    const std::string differs = checkpoint::difference(source_, wanted);
    require(!options_.load_module_strict || differs.empty(), source_.location(),
            ": load_checkpoint: the checkpoint does not fit the model: ", differs,
            ". Pass load_module_strict = false to take what both have");
    if (!differs.empty() && impl_.world->rank() == 0) {
      log::warning("load_checkpoint: ", source_.location(), ": ", differs, " (load_module_strict is false)");
    }
  }

  // What ranks of other stages look for.
  void add_other_stages(std::map<std::string, std::vector<int64_t>>& wanted) const {
    if (!impl_.pipeline) return;
    for (const auto& [path, tensor] : source_.tensors()) {
      for (const char* kind : {"weights/", "buffers/"}) {
        const std::string name = checkpoint::name_in(kind, path);
        if (!name.empty() && impl_.pipeline->module->is_elsewhere(name)) wanted.emplace(path, tensor.sizes);
      }
    }
  }

  void require_states() const {
    require(source_.state().optimizer.has_value(), source_.location(), ": load_checkpoint: the checkpoint has no ",
            "optimizer states; pass load_optimizer_states = false to begin with fresh ones");
    const std::string& writer = source_.state().optimizer->type;
    if (writer != impl_.optimizer->name() && impl_.world->rank() == 0) {
      log::warning("load_checkpoint: ", source_.location(), ": written by ", writer, ", goes on with ",
                   impl_.optimizer->name());
    }
    std::set<std::string> own;
    for (const auto& [name, values] : impl_.optimizer->shared_states()) own.insert(state_of_parameter(name));
    for (size_t b = 0; b < impl_.buckets.size(); ++b) {
      for (const auto& [state, values] : impl_.optimizer->states(static_cast<int64_t>(b))) {
        own.insert(state);
        for (const Segment& segment : impl_.buckets[b].layout().segments) {
          const auto& [path, sizes] = state_of(state, segment);
          if (segment.length == 0 || path.empty()) continue;
          require(source_.contains(path) && source_.info(path).sizes == sizes, source_.location(),
                  ": load_checkpoint: expected \"", path, "\" of shape ", c10::IntArrayRef(sizes), " for ",
                  impl_.optimizer->name(), ", found none: the checkpoint was written by ",
                  source_.state().optimizer->type, "; pass load_optimizer_states = false to begin with fresh states");
        }
      }
    }
    if (impl_.buckets.empty()) return;
    for (const auto& [path, tensor] : source_.tensors()) {
      const std::string rest = checkpoint::name_in("optimizer/", path);
      require(rest.empty() || own.contains(rest.substr(0, rest.find('/'))), source_.location(),
              ": load_checkpoint: found \"", path, "\", which ", impl_.optimizer->name(),
              " does not have: the checkpoint was written by ", source_.state().optimizer->type,
              "; pass load_optimizer_states = false to begin with fresh states");
    }
  }

  // The path of a parameter's state and its shape; an empty path where the checkpoint does not have the parameter.
  std::pair<std::string, std::vector<int64_t>> state_of(const std::string& state, const Segment& segment) const {
    const auto index = static_cast<size_t>(segment.parameter);
    const std::string& weight = weights_.at(impl_.parameters[index].name);
    if (weight.empty()) return {};
    return {checkpoint::state_path(state, checkpoint::name_in("weights/", weight)), impl_.parameter_infos[index].sizes};
  }

  void read_trained(size_t b) {
    const zero::ParameterBucket& bucket = impl_.buckets[b];
    const bool partitioned = impl_.plan.partition_optimizer;
    const BucketRange range = held_range(impl_, bucket.layout(), partitioned);
    use_bucket(impl_, b, /*changes=*/true, [&] {
      for_each_run(bucket.layout(), range, [&](const Segment& run, int64_t position) {
        const std::string& path = weights_.at(impl_.parameters[static_cast<size_t>(run.parameter)].name);
        if (path.empty()) return;
        read_flat(source_, path, run.parameter_offset, impl_.masters[b].narrow(0, position, run.length));
      });
      const at::Tensor own = partitioned ? bucket.slice(impl_.groups.shards->rank()) : bucket.flat();
      if (!own.is_alias_of(impl_.masters[b])) at::Tensor(own).copy_(impl_.masters[b]);
      if (!with_optimizer_ || !impl_.optimizer) return;
      for (const auto& [state, values] : impl_.optimizer->states(static_cast<int64_t>(b))) {
        for_each_run(bucket.layout(), range, [&, &name = state, &flat = values](const Segment& run, int64_t position) {
          const std::string path = state_of(name, run).first;
          if (!path.empty()) read_flat(source_, path, run.parameter_offset, flat.narrow(0, position, run.length));
        });
      }
    });
  }

  void read_frozen_bucket(size_t f) {
    const zero::ParameterBucket& bucket = impl_.frozen_buckets[f];
    const BucketRange range = held_range(impl_, bucket.layout(), bucket.sharded());
    const at::Tensor flat = bucket.sharded() ? bucket.slice(impl_.groups.shards->rank()) : bucket.flat();
    bucket.use_slice(/*changes=*/true, [&] {
      for_each_run(bucket.layout(), range, [&](const Segment& run, int64_t position) {
        const std::string& path = weights_.at(impl_.frozen[static_cast<size_t>(run.parameter)].name);
        if (!path.empty()) read_flat(source_, path, run.parameter_offset, flat.narrow(0, position, run.length));
      });
    });
  }

  void read_frozen_parameters() {
    for (const zero::Parameter& parameter : impl_.frozen) {
      const std::string& path = weights_.at(parameter.name);
      if (path.empty()) continue;
      const at::Tensor target = parameter.tensor.detach();
      if (target.is_contiguous()) {
        read_flat(source_, path, 0, target.view({-1}));
      } else {
        const at::Tensor values = at::empty(target.sizes(), target.scalar_type());
        source_.read(path, 0, values);
        at::Tensor(target).copy_(values);
      }
    }
  }

  void take_position(const checkpoint::DataPosition& saved) {
    try {
      impl_.loader->load_state({.epoch = saved.epoch, .next_sample = saved.next_sample, .seed = saved.seed});
    } catch (const UsageError& error) {  // other data than the run had that saved, so its position means nothing
      log::warning("load_checkpoint: ", source_.location(), ": the training data begins anew: ", error.what());
    }
  }

  void take_over_states() {
    impl_.optimizer->states_changed(has_rank_states_);
    if (!impl_.plan.error_feedback) return;
    const at::NoGradGuard no_grad;
    for (size_t b = 0; b < impl_.buckets.size(); ++b) {  // where ranks step by themselves
      const at::Tensor weights = impl_.optimizer->weights(static_cast<int64_t>(b));
      if (weights.is_same(impl_.masters[b])) continue;
      at::Tensor(impl_.buckets[b].flat()).copy_(weights);
    }
  }

  void take_groups(const checkpoint::OptimizerState& saved) {
    impl_.optimizer->set_step_count(saved.step_count);
    std::vector<optimizers::GroupOptions>& groups = impl_.optimizer->groups();
    const bool says = impl_.world->rank() == 0;
    if (saved.groups.size() != groups.size()) {
      if (says) {
        log::warning("load_checkpoint: the checkpoint has ", saved.groups.size(), " parameter groups, the engine ",
                     groups.size(), ": learning rates and other options of the groups stay as they are");
      }
      return;
    }
    for (size_t i = 0; i < groups.size(); ++i) {
      if (says && !impl_.schedule && saved.groups[i].lr != groups[i].lr) {
        log::info("load_checkpoint: parameter group ", i, ": lr ", saved.groups[i].lr,
                  " from the checkpoint, in place ", "of ", groups[i].lr);
      }
      const bool non_freeze = groups[i].non_freeze;  // the program's
      groups[i] = saved.groups[i];
      groups[i].non_freeze = non_freeze;
    }
  }

  Engine::Impl& impl_;
  Source& source_;
  const LoadOptions& options_;
  bool with_optimizer_;
  bool same_ranks_;
  bool has_rank_states_ = false;                // of the optimizer
  std::map<std::string, std::string> weights_;  // by parameter name: its path in the source, or empty
};

// Calls `action`, collects what it throws, and returns what is worst on any rank.
template <class Action>
Outcome on_all_ranks(const Engine::Impl& impl, std::exception_ptr& failure, const Action& action) {
  Outcome own = Outcome::kGood;
  try {
    action();
  } catch (const IoError&) {
    own = Outcome::kDamaged;
    failure = std::current_exception();
  } catch (const std::filesystem::filesystem_error& error) {
    own = Outcome::kDamaged;
    failure = std::make_exception_ptr(IoError(error.what()));
  } catch (...) {
    own = Outcome::kUnfit;
    failure = std::current_exception();
  }
  return static_cast<Outcome>(
      largest_of_ranks(static_cast<int64_t>(own), impl.device, *impl.world, "outcome of reading a checkpoint"));
}

[[noreturn]] void throw_failure(const std::exception_ptr& failure, const std::string& path) {
  if (failure) std::rethrow_exception(failure);
  throw IoError(cat("load_checkpoint: ", path, ": another rank could not load it, its message says why"));
}

// Rank 0: tags to try, the preferred one first.
std::vector<std::string> tags_to_try(const std::string& load_dir, const std::string& tag) {
  checkpoint::put_back_replaced(load_dir);
  if (!tag.empty()) return {tag};
  std::vector<std::string> tags;
  std::optional<std::string> latest;
  try {
    latest = checkpoint::read_latest(load_dir);
    if (latest) checkpoint::require_tag(*latest);
  } catch (const Error& error) {
    log::error("load_checkpoint: the file `latest` cannot be used: ", error.what());
    latest.reset();
  }
  if (latest) tags.push_back(*latest);
  for (const checkpoint::TagInfo& whole : checkpoint::whole_tags(load_dir)) {
    if (whole.tag != latest) tags.push_back(whole.tag);
  }
  return tags;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

LoadedCheckpoint Engine::load_checkpoint(const std::string& load_dir, const std::string& tag,
                                         const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  const Autocast::Pause pause(self.device.type());  // casted copies of the weights before would stay
  self.require_states_here("load_checkpoint()");
  require(self.backwards_since_step == 0 && self.micro_steps_since_update == 0,
          "load_checkpoint() was called inside an accumulation, after ", self.micro_steps_since_update, " of ",
          self.config.gradient_accumulation_steps, " micro-batches; call it between optimizer steps");
  require(self.gathered_scopes == 0, "load_checkpoint() was called while ", self.gathered_scopes,
          " scopes of gathered_parameters() are open; end them first");
  const bool with_states = !options.load_module_only && options.load_optimizer_states;
  require(!(self.half_loaded_states || self.half_stepped) || with_states, "load_checkpoint() without optimizer states ",
          "was called after ", self.half_stepped ? "a step()" : "one with them", " had failed part of the way: the ",
          "optimizer's are a mixture; load them too");
  const Impl::Phase phase(self, "load_checkpoint");
  if (const std::string failure = self.finish_save(); !failure.empty()) log::error(failure);
  synchronize_parameters();
  const bool first = self.world->rank() == 0;
  const std::string folder = text_of_first_rank(load_dir, self.device, *self.world);
  std::string joined;
  std::exception_ptr failure;
  const Outcome listed = on_all_ranks(self, failure, [&] {
    if (!first) return;
    for (const std::string& candidate : tags_to_try(folder, tag)) joined += candidate + '\n';
  });
  if (listed != Outcome::kGood) throw_failure(failure, folder);
  const std::vector<std::string> tags = lines_of(text_of_first_rank(joined, self.device, *self.world));
  if (tags.empty()) {
    if (first)
      log::warning("load_checkpoint: no checkpoint in ", folder, ": no file `latest` and no whole tag; ",
                   "nothing is loaded");
    return {};
  }
  for (size_t i = 0; i < tags.size(); ++i) {
    const std::string path = checkpoint::tag_path(folder, tags[i]);
    failure = nullptr;
    std::unique_ptr<Source> source;
    std::optional<Loading> loading;
    Outcome outcome = on_all_ranks(self, failure, [&] {
      source = checkpoint::open(path);
      loading.emplace(self, *source, options);
    });
    if (outcome == Outcome::kGood) {
      self.half_loaded = true;
      self.half_loaded_states |= with_states;
      outcome = on_all_ranks(self, failure, [&] { loading->read(); });
    }
    if (outcome == Outcome::kGood) {
      const std::exception_ptr encoded = loading->read_encoded();
      outcome = on_all_ranks(self, failure, [&] {
        if (encoded) std::rethrow_exception(encoded);
      });
    }
    if (outcome == Outcome::kGood) {
      loading->publish();
      loading->take_counters();
      self.half_loaded = false;
      self.half_loaded_states = false;
      self.half_stepped = false;
      self.reducer->reset();
      if (self.optimizer) self.reducer->keep_local(self.optimizer->wants_local_gradients());
      return {.path = path, .tag = tags[i], .client_state = source->state().client_state};
    }
    if (outcome == Outcome::kUnfit || i + 1 == tags.size()) throw_failure(failure, path);
    if (first) {
      log::error("load_checkpoint: ", path, " cannot be used: ",
                 failure ? message_of(failure) : std::string("another rank could not read it, its message says why"),
                 ". Falling back to ", tags[i + 1]);
    }
  }
  throw InternalError("load_checkpoint: no outcome");
}

}  // namespace ds::engine
