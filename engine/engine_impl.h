// What an Engine is made of. Included by engine/*.cc only.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/background_save.h"
#include "checkpoint/save_job.h"
#include "comm/bucket_reduction.h"
#include "comm/flight/flight_watch.h"
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/device_mesh.h"
#include "dsengine/engine.h"
#include "dsengine/lr_scheduler.h"
#include "engine/offloaded/offloaded_state.h"
#include "engine/offloaded/speculation_gate.h"
#include "engine/plan/plan.h"
#include "engine/report/batch_notes.h"
#include "engine/report/reporter.h"
#include "engine/setup/pipeline_parts.h"
#include "engine/state/autocast.h"
#include "engine/state/rank_groups.h"
#include "offload/moved_storage.h"
#include "optim/loss_scaler.h"
#include "optim/shard_optimizer.h"
#include "pipeline/stage_placement.h"
#include "zero/gradient_check.h"
#include "zero/gradient_reducer.h"
#include "zero/parameter_bucket.h"
#include "zero/parameter_gatherer.h"
#include "zero/parameter_publisher.h"

namespace ds::engine {

// Order of members is order of construction; later ones refer to earlier ones.
struct Engine::Impl {
  std::shared_ptr<comm::FlightWatch> flight;  // first, so that it ends last; null: nobody watches
  std::shared_ptr<torch::nn::Module> module;
  config::DsConfig config;
  Plan plan;
  std::shared_ptr<comm::Communicator> world;         // all ranks
  std::shared_ptr<comm::Communicator> communicator;  // those with the same part of the model: data-parallel ranks
  std::shared_ptr<comm::DeviceMesh> mesh;            // of a pipeline; keeps its groups
  std::unique_ptr<PipelineParts> pipeline;           // null: the model is no PipelineModule
  RankGroups groups;
  int local_rank = 0;
  at::Device device = at::kCPU;

  std::unique_ptr<OffloadedState> offloaded;  // null: all stays on the device
  std::vector<zero::Parameter> parameters;    // trainable, tied ones once, in module order
  std::vector<ParameterInfo> parameter_infos;
  std::vector<zero::Parameter> frozen;
  std::vector<zero::ParameterBucket> buckets;
  std::vector<zero::ParameterBucket> frozen_buckets;  // stage 3
  // Per bucket: what the optimizer updates. float32 models: views of the buckets; else float32 copies.
  std::vector<at::Tensor> masters;
  std::unique_ptr<comm::BucketReduction> reduction;     // null: gradients are sent as they are
  std::unique_ptr<zero::GradientCheck> gradient_check;  // null: without locate_non_finite
  std::unique_ptr<zero::GradientReducer> reducer;
  std::unique_ptr<zero::ParameterAccess> access;
  zero::ParameterGatherer* gatherer = nullptr;  // stage 3: `access`

  std::shared_ptr<optimizers::ShardOptimizer> optimizer;
  std::shared_ptr<torch::optim::Optimizer> client_optimizer;
  std::optional<optimizers::LossScaler> loss_scaler;
  std::shared_ptr<LrScheduler> schedule;
  std::unique_ptr<Reporter> reporter;
  std::unique_ptr<Autocast> autocast;
  std::shared_ptr<DataLoader> loader;

  std::optional<bool> boundary_override;
  bool synchronize = true;  // false inside no_sync()
  int64_t backwards_since_step = 0;
  int64_t micro_steps = 0;
  int64_t micro_steps_since_update = 0;
  int64_t global_steps = 0;
  int64_t global_samples = 0;
  int64_t applied_steps = 0;
  bool step_applied = false;
  std::optional<double> gradient_norm;
  BatchNotes batches;  // of the running accumulation
  int64_t bad_steps_in_a_row = 0;
  bool warned_of_zero_grad = false;
  int64_t gradient_bytes = 0;  // peak of the last step
  int64_t gathered_bytes = 0;  // likewise
  int gathered_scopes = 0;     // of gathered_parameters() that are open
  int read_only_scopes = 0;    // those of them without a modifier rank

  // super_offload, engine/update/speculation.cc: updates on the host that begin in backward.
  SpeculationGate speculation_gate;
  SpeculationOutcome speculation = SpeculationOutcome::kNone;  // of the running step; kRolledBack until it stands
  void begin_speculation(bool boundary);
  void end_arrivals();
  void roll_back_speculation() noexcept;
  bool speculation_fits(double gradient_scale);  // false: it is rolled back, if there was one
  bool publish_speculation();
  void judge_speculation();  // once a step, when it is over
  void report_speculation() const;

  // Between offload_states() and reload_states().
  struct MovedStates {
    std::optional<offload::MovedStorage> memory;
    std::vector<std::pair<at::Tensor, at::Tensor>> hidden;  // a parameter, and what it shows otherwise
  };
  std::unique_ptr<MovedStates> moved_states;
  void require_states_here(const char* call) const;
  // What a report of a stall says that this rank is doing.
  void note_phase(const char* phase);
  // Says so from its construction on, and afterwards that the program has the word.
  class Phase {
   public:
    Phase(Impl& impl, const char* phase) : impl_(impl) { impl_.note_phase(phase); }
    ~Phase() { impl_.note_phase(kBetweenCalls); }
    Phase(const Phase&) = delete;
    Phase& operator=(const Phase&) = delete;
    static constexpr const char* kBetweenCalls = "the program (data, forward)";

   private:
    Impl& impl_;
  };
  std::vector<at::Tensor> tensors_of(const OffloadStates& states) const;  // that this rank holds on the device

  // Checkpoints.
  bool half_stepped = false;                      // some slices have an update that others do not have
  bool half_loaded = false;                       // a load failed part of the way
  bool half_loaded_states = false;                // likewise, and it was one with optimizer states
  std::shared_ptr<checkpoint::SaveJob> save_job;  // of the last asynchronous save, until finish_save()
  checkpoint::BackgroundSave saving;
  void require_whole_state(const char* call) const;
  // Returns when no save is in flight, with the message of the last one's failure, if any. Collective.
  std::string finish_save();
  void end_save() noexcept;  // likewise when the engine ends: not collective, the message goes to the log

  // Stage 3: calls `use` for each bucket from `first` on (trainable ones, then frozen ones) while its parameters are
  // whole. Collective.
  void for_each_whole_bucket(size_t first, const std::function<void(const zero::ParameterBucket&)>& use);
  int64_t frozen_bytes() const;        // that this rank holds now
  int64_t device_state_bytes() const;  // of the optimizer
  std::vector<comm::Communicator*> all_groups() const;
  // The parameters of a bucket were changed by the program: the optimizer goes on from them.
  void take_over_changes(size_t bucket);
  at::Tensor whole_master(size_t bucket);
  // Calls `use` with the master of a bucket while it is in memory. `changes`: it writes there.
  void use_master(size_t bucket, bool changes, const std::function<void(const at::Tensor&)>& use);
  // The lowest of the ranks with the same part of the model.
  int first_of_part() const { return world->rank() - communicator->rank(); }
  bool at_boundary() const;
  bool boundary_is_known() const;
  // Runs `pass`, a backward pass or a part of one that adds to gradients, and begins the reductions that follow from
  // it. `in_pass` as of GradientReducer::begin_backward.
  void accumulate(bool boundary, const std::function<void()>& pass, std::vector<char> in_pass = {});
  // Of the micro-batch that the next pass belongs to, from 0; -1: nobody knows.
  void begin_micro_batch(int64_t micro_batch);
  // The boundary of an accumulation: update, schedule, report. `loss` may be undefined.
  void complete_step(const Engine& engine, const at::Tensor& loss = {});
  void reduce_tied();
  // What backward starts from: over the accumulation's micro-batches, with loss scale.
  at::Tensor averaged(const at::Tensor& loss) const;
  at::Tensor scaled(const at::Tensor& averaged) const;
  // One optimizer step; sets step_applied and gradient_norm.
  void update();
  double global_norm();  // with loss scale; also decides whether a step is skipped
  std::string judge(double norm);
  std::string explain_non_finite(double norm);  // collective
  // Of the running accumulation. `unused`: the program starts it anew.
  void drop_gradients(bool unused = false);
  // After an update that threw: as if the accumulation of so many micro-batches had not been, before which the
  // optimizer had made so many steps.
  void undo_accumulation(int64_t micro_batches, int64_t optimizer_steps) noexcept;
  bool dynamic_loss_scale() const { return loss_scaler && loss_scaler->dynamic(); }
  void apply(double gradient_scale);
  bool delays_update() const;
  void finish_delayed_update();  // collective
  // gradient_clip_by_value, on a gradient that the update will multiply by `gradient_scale`.
  void clip_by_value(const at::Tensor& gradient, double gradient_scale) const;
  // New weights, on the host, of a bucket whose master is updated.
  void publish(size_t bucket, const at::Tensor& weights);
  void update_slice(size_t bucket, const at::Tensor& gradient, double gradient_scale);
  void require_gradients();
};

}  // namespace ds::engine
