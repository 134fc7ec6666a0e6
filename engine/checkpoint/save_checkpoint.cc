// Engine::save_checkpoint: every rank writes its part, rank 0 publishes.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <filesystem>
#include <map>
#include <utility>

#include "checkpoint/save_job.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/log.h"
#include "engine/agreement/shared_failure.h"
#include "engine/agreement/shared_text.h"
#include "engine/checkpoint/checkpoint_pieces.h"
#include "engine/checkpoint/rank_state.h"
#include "engine/data/distributed_sampler.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

using checkpoint::SaveJob;

// How long rank 0 waits for other ranks' parts once its own is written. What was written before ranks met is visible to
// it after a moment, even over a network file system.
constexpr std::chrono::minutes kPatience(10);
constexpr std::chrono::seconds kVisible(60);

// The number of a rank that failed, or -1; this rank's failure is not thrown. Collective.
int which_failed(const Engine::Impl& impl, const std::exception_ptr& failure) {
  try {
    return failed_rank(failure, impl.device, *impl.world);
  } catch (...) {
    if (!failure) throw;  // of the collective
    return impl.world->rank();
  }
}

template <class Action>
std::exception_ptr attempt(const Action& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// As torch writes it.
std::string precision_of(const Engine::Impl& impl) {
  switch (impl.buckets.front().flat().scalar_type()) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    default:
      return "float32";
  }
}

checkpoint::TrainingState training_state(const Engine& engine, const Engine::Impl& impl,
                                         const nlohmann::json& client_state) {
  checkpoint::TrainingState state;
  state.global_steps = impl.global_steps;
  state.global_samples = impl.global_samples;
  state.micro_steps = impl.micro_steps;
  state.skipped_steps = engine.skipped_steps();
  state.world_size = impl.world->size();
  state.pipeline_stages = impl.pipeline ? impl.pipeline->ranks->size() : 1;
  state.zero_stage = engine.zero_optimization_stage();
  state.precision = precision_of(impl);
  if (impl.optimizer) {
    state.optimizer = {
        .type = impl.optimizer->name(), .step_count = impl.optimizer->step_count(), .groups = impl.optimizer->groups()};
  }
  if (impl.client_optimizer) state.optimizer = client_optimizer_state(*impl.client_optimizer);
  if (impl.loss_scaler) state.loss_scaler = impl.loss_scaler->state();
  if (impl.schedule) state.lr_iteration = impl.schedule->last_batch_iteration();
  if (impl.loader) {
    const SamplerState position = impl.loader->state();
    state.data = {.epoch = position.epoch, .next_sample = position.next_sample, .seed = position.seed};
  }
  state.config = nlohmann::json(impl.config.text);
  state.client_state = client_state;
  return state;
}

// Tied parameters: each further name and the first one.
std::map<std::string, std::string> aliases_of(const torch::nn::Module& module) {
  std::map<const void*, std::string> first;
  std::map<std::string, std::string> aliases;
  for (const auto& item : module.named_parameters()) {
    const auto [place, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (!is_new) aliases.emplace(item.key(), place->second);
  }
  return aliases;
}

// Own pieces: those of the model state, then copies of what is the rank's own.
struct SavedState {
  std::vector<StatePiece> pieces;
  std::vector<bool> copied;  // of the pieces, before an asynchronous save returns
  NamedTensors own;

  std::vector<checkpoint::PlannedPiece> plan() const {
    std::vector<checkpoint::PlannedPiece> planned;
    for (const StatePiece& piece : pieces) planned.push_back(piece.plan);
    for (const auto& [path, values] : own) {
      checkpoint::PlannedPiece& piece = planned.emplace_back();
      piece.path = path;
      piece.tensor.dtype = values.scalar_type();
      piece.tensor.sizes = values.sizes().vec();
      piece.length = values.numel();
    }
    return planned;
  }
};

at::Tensor on_host(const at::Tensor& values) { return values.is_cpu() ? values : values.to(at::kCPU); }

// Calls `use` with each piece while it is in memory, bucket by bucket.
void for_each_piece(Engine::Impl& impl, const std::vector<StatePiece>& pieces,
                    const std::function<void(size_t index)>& use) {
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin;
    while (end < pieces.size() && pieces[end].bucket == pieces[begin].bucket) ++end;
    use_bucket(impl, pieces[begin].bucket, /*changes=*/false, [&] {
      for (size_t i = begin; i < end; ++i) use(i);
    });
    begin = end;
  }
}

void write_own(SaveJob& job, const SavedState& state) {
  for (size_t i = 0; i < state.own.size(); ++i) job.write(state.pieces.size() + i, state.own[i].second);
}

void write_live(Engine::Impl& impl, SaveJob& job, const SavedState& state) {
  job.open(state.plan());
  for_each_piece(impl, state.pieces, [&](size_t i) { job.write(i, on_host(state.pieces[i].values())); });
  write_own(job, state);
  job.finish();
}

// Copies on another thread, which on a device has to wait for what this one has queued there.
class DeviceOrder {
 public:
  explicit DeviceOrder(at::Device device) : device_(device) {
    if (device.is_cpu()) return;
    event_ = std::make_shared<c10::Event>(device.type());
    event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  // Runs `action` with a stream of its own as the current one, after what was queued.
  void run_after(const std::function<void()>& action) const {
    if (!event_) return action();
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::StreamGuard on_stream(guard.getStreamFromGlobalPool(device_));
    event_->block(on_stream.current_stream());
    action();
  }

 private:
  at::Device device_;
  std::shared_ptr<c10::Event> event_;
};

void copy_piece(StatePiece& piece) {
  const at::Tensor values = piece.values();
  piece.flat = at::empty(values.sizes(), values.options().device(at::kCPU));
  piece.flat.copy_(values);
  piece.position = 0;
}

}  // namespace

void Engine::Impl::require_whole_state(const char* call) const {
  constexpr const char* kMixture =
      " had failed part of the way: weights and optimizer states are a mixture; load a checkpoint that is whole first";
  require(!half_loaded, call, " was called after load_checkpoint()", kMixture);
  require(!half_stepped, call, " was called after a step()", kMixture);
}

std::string Engine::Impl::finish_save() {
  if (!save_job) return {};
  std::exception_ptr failure = saving.wait_written();
  int failed = which_failed(*this, failure);
  if (failed >= 0) save_job->cancel();
  const std::exception_ptr publication = saving.wait_published();
  if (!failure) failure = publication;
  if (failed < 0) failed = which_failed(*this, publication);
  const checkpoint::SaveTarget target = save_job->target();
  save_job.reset();
  if (failed < 0) return {};
  if (target.rank == 0) checkpoint::abandon_tag(target.save);
  return cat("checkpoint \"", target.save.tag, "\" was not written: ",
             failure ? message_of(failure) : cat("rank ", failed, " failed, its message says why"));
}

void Engine::Impl::end_save() noexcept {
  if (!save_job) return;
  if (std::uncaught_exceptions() > 0) save_job->hurry(kVisible);  // another rank may be gone
  const std::exception_ptr failure = saving.wait_published();
  const checkpoint::SaveTarget target = save_job->target();
  save_job.reset();
  if (!failure) return;
  log::error("checkpoint \"", target.save.tag, "\" was not written: ", message_of(failure));
  if (target.rank == 0) checkpoint::abandon_tag(target.save);
}

void Engine::wait_for_checkpoint() {
  const std::string failure = impl_->finish_save();
  require<IoError>(failure.empty(), failure);
}

std::string Engine::save_checkpoint(const std::string& save_dir, const std::string& given_tag,
                                    const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  self.require_states_here("save_checkpoint()");
  self.require_whole_state("save_checkpoint()");
  require(self.backwards_since_step == 0 && self.micro_steps_since_update == 0,
          "save_checkpoint() was called inside an accumulation, after ", self.micro_steps_since_update, " of ",
          self.config.gradient_accumulation_steps, " micro-batches, whose gradients would be lost; call it after the ",
          "step() at the boundary");
  require(self.gathered_scopes == 0, "save_checkpoint() was called while ", self.gathered_scopes,
          " scopes of gathered_parameters() are open; end them first");
  const Impl::Phase phase(self, "save_checkpoint");
  if (const std::string failure = self.finish_save(); !failure.empty()) log::error(failure);
  synchronize_parameters();

  comm::Communicator& world = *self.world;
  const std::string wanted = given_tag.empty() ? cat("global_step", self.global_steps) : given_tag;
  if (self.config.checkpoint.tag_validation != config::TagValidation::kIgnore &&
      !same_text_on_all_ranks(wanted, self.device, world)) {
    const std::string text = "save_checkpoint: ranks gave different tags (checkpoint.tag_validation)";
    require<ConfigError>(self.config.checkpoint.tag_validation != config::TagValidation::kFail, text, ", this one \"",
                         wanted, "\"; expected the same on every rank");
    log::warning(text, "; all use rank 0's");
  }
  checkpoint::TagSave save = checkpoint::new_save(std::filesystem::absolute(save_dir).string(), wanted);
  for (std::string* text : {&save.save_dir, &save.tag, &save.incomplete}) {
    *text = text_of_first_rank(*text, self.device, world);
  }
  auto job = std::make_shared<SaveJob>(
      checkpoint::SaveTarget{.save = std::move(save),
                             .rank = world.rank(),
                             .ranks = world.size(),
                             .save_latest = options.save_latest,
                             .keep_last = options.keep_last.value_or(self.config.checkpoint.keep_last),
                             .durable = self.config.checkpoint.durable});
  const checkpoint::SaveTarget& target = job->target();
  const auto agree = [&](const std::exception_ptr& failure, const char* doing) {
    const int failed = which_failed(self, failure);
    if (failed < 0) return;
    if (world.rank() == 0) checkpoint::abandon_tag(target.save);
    if (failure) std::rethrow_exception(failure);
    throw IoError(cat("save_checkpoint: \"", target.save.tag, "\" in ", target.save.save_dir, ": rank ", failed,
                      " could not ", doing, ", its message says why"));
  };

  auto state = std::make_shared<SavedState>();
  BufferCopies buffers;
  agree(attempt([&] {
          state->own = rank_tensors(self);
          buffers = copy_buffers(self);
        }),
        "copy what is its own");
  add_buffers(self, buffers, state->own);
  checkpoint::TrainingState training = training_state(*this, self, options.client_state);
  agree(attempt([&] {
          if (world.rank() != 0) return;
          try {
            const nlohmann::json whole = checkpoint::to_json(training);
            require(nlohmann::json::parse(whole.dump()) == whole, "save_checkpoint: client_state or the ds_config ",
                    "does not come back from JSON as it is: it has an infinite number or one that is none (NaN)");
          } catch (const nlohmann::json::exception& error) {
            throw UsageError(cat("save_checkpoint: client_state or the ds_config is no JSON text: ", error.what()));
          }
          checkpoint::begin_tag(target.save);
        }),
        "begin it");
  auto publish = [job, training = std::move(training), aliases = aliases_of(*self.module)](auto patience) {
    if (job->target().rank == 0) job->publish(training, aliases, patience);
  };
  agree(attempt([&] { state->pieces = state_pieces(self, !options.exclude_frozen_parameters); }), "list its part");
  const std::string path = checkpoint::tag_path(target.save.save_dir, target.save.tag);
  if (!options.asynchronous.value_or(self.config.checkpoint.writer && self.config.checkpoint.writer->decoupled)) {
    agree(attempt([&] { write_live(self, *job, *state); }), "write its part");
    agree(attempt([&] { publish(kVisible); }), "publish it");
    return path;
  }
  // What lies in files has memory only within for_each_piece(), which is for this thread. Frozen parameters that are
  // not divided are the module's own tensors: a program may change them (moving averages).
  const bool in_files = self.offloaded && self.offloaded->bytes().file > 0;
  const auto copied_now = [&self, in_files](const StatePiece& piece) {
    const size_t trained = self.buckets.size();
    return in_files || piece.bucket == StatePiece::kNoBucket ||
           (piece.bucket >= trained && !self.frozen_buckets[piece.bucket - trained].sharded());
  };
  agree(attempt([&] {
          state->copied.resize(state->pieces.size());
          for_each_piece(self, state->pieces, [&](size_t i) {
            state->copied[i] = copied_now(state->pieces[i]);
            if (state->copied[i]) copy_piece(state->pieces[i]);
          });
        }),
        "copy its part");
  checkpoint::BackgroundSave::Parts parts;
  parts.copy = [state, job, order = std::make_shared<DeviceOrder>(self.device)](const auto& hurry) {
    const at::NoGradGuard no_grad_here;
    job->open(state->plan());
    order->run_after([&] {
      for (size_t i = 0; i < state->pieces.size(); ++i) {
        StatePiece& piece = state->pieces[i];
        if (state->copied[i]) continue;
        if (!piece.flat.is_cpu() || hurry()) {
          copy_piece(piece);
        } else {  // from its place, which saves memory and time of a copy
          job->write(i, piece.values());
          piece.flat.reset();
        }
      }
    });
  };
  parts.write = [state, job] {
    for (size_t i = 0; i < state->pieces.size(); ++i) {
      if (!state->pieces[i].flat.defined()) continue;  // written from its place
      job->write(i, state->pieces[i].values());
      state->pieces[i].flat.reset();  // its memory
    }
    write_own(*job, *state);
    job->finish();
  };
  parts.publish = [publish] { publish(kPatience); };
  parts.failed = [job] { job->give_up(); };
  self.save_job = job;
  self.saving.start(std::move(parts));
  return path;
}

}  // namespace ds::engine
