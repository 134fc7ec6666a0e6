// The training engine: wraps any torch::nn::Module, driven by a ds_config. Method names and meaning are DeepSpeed's.
//
//   using namespace ds;
//   auto [engine, optimizer, loader, schedule] =
//       engine::initialize({.model = model.ptr(), .config = "ds_config.json", .training_data = dataset});
//   for (auto& batch : *loader) {
//     auto loss = model->forward(batch.data, batch.target);
//     engine->backward(loss);
//     engine->step();
//   }
//
// One Engine belongs to one rank; its methods are called from the thread that made it, in the same order on every rank.
//
// At stage 3 a parameter has memory only while operators of that thread read it: forward runs there, all ranks run it
// together, and after the engine's end the parameters have no elements (take module_state_dict() before).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsengine/checkpoint.h"
#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "dsengine/pipeline.h"
#include "dsengine/zero.h"
#include "engine/plan/plan.h"

namespace ds::engine {

// What Engine::offload_states moves.
struct OffloadStates {
  bool optim_states = true;  // of the optimizer
  bool hp_params = true;     // float32 masters, where they are not the parameters themselves
  bool lp_params = true;     // parameters, trainable and frozen
  bool lp_grads = true;      // memory of gradients and their buckets; it is given up, there is nothing in it
  bool pin_memory = true;
};

// Of Engine::eval_batch.
struct EvalOptions {
  std::optional<int64_t> num_micro_batches;  // default: as in training
  bool compute_loss = true;
  bool return_logits = false;
  bool broadcast_logits = false;  // with return_logits: to all ranks of the pipeline
};
struct Evaluation {
  at::Tensor loss;                              // as of train_batch; undefined without compute_loss
  std::vector<std::vector<at::Tensor>> logits;  // return_logits: of each micro-batch, on the rank of the last stage
};

class Engine {
 public:
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- one training step -------------------------------------------------------------------------------------------
  // Calls model->forward(inputs...), with floating-point tensors moved to the engine's device and, under
  // fp16.auto_cast, cast to float16. Calling the model directly is as good where inputs are right already.
  // `model`: a module holder or pointer, usually that of module().
  template <class Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    return model->forward(prepared(std::forward<Inputs>(inputs))...);
  }
  // Scales the scalar `loss` (by 1/gradient_accumulation_steps unless scale_wrt_gas is false, and by the loss scale),
  // runs autograd, and reduces gradients as they become ready. Returns the loss divided by gradient_accumulation_steps,
  // without loss scale, detached. Several calls before a step() add up. Throws UsageError for a loss that is not a
  // scalar or has no graph. After an exception out of autograd that all ranks have had, call zero_grad() and begin the
  // accumulation anew; after one of this rank alone end the program, because the others have begun other collectives.
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);
  // Counts one micro-batch; at the gradient accumulation boundary finishes the reductions, clips, updates the
  // parameters, zeroes the gradients and advances the schedule. Throws UsageError when no backward() came before, and
  // NonFiniteError, on all ranks, where a gradient is infinite or NaN and non_finite_gradients makes that an error: the
  // state is then that before the accumulation, and training can go on (docs/non_finite.md). So it is after other
  // exceptions that came before the update; after one that came in the middle of it (a client optimizer that throws, a
  // file that cannot be read) calls throw UsageError until a checkpoint with optimizer states is loaded.
  void step();
  // What reports call the next micro-batch, in place of samples of the engine's loader. For pipelines in the function
  // that gives micro-batches.
  void name_batch(std::string name);
  bool is_gradient_accumulation_boundary() const;
  // Overrides the counted boundary until it is set again; nullopt counts as before (with managed_gradient_accumulation:
  // false every step() is one).
  void set_gradient_accumulation_boundary(std::optional<bool> is_boundary);

  // --- pipelines: a model that is a pipeline::PipelineModule (docs/pipeline.md) ------------------------------------
  // One whole step: gradient_accumulation_steps micro-batches through the stages in the order of pipeline.schedule,
  // then the update. Returns the mean loss over micro-batches and data-parallel ranks, a float32 scalar, on every rank.
  // Collective. Without a source: from set_dataloader(), set_dataiterator() or the training data of initialize, epoch
  // after epoch. backward() and step() throw UsageError. Calls train() where the module is in evaluation mode. An error
  // of one rank leaves the others waiting for its messages until their time limit or the launcher ends them; on one
  // stage the batch is dropped, on several ones later calls throw UsageError.
  at::Tensor train_batch();
  at::Tensor train_batch(const pipeline::BatchSource& next);
  // Forwards only, in evaluation mode; then every module has the mode it had. Collective.
  Evaluation eval_batch(const pipeline::BatchSource& next, const EvalOptions& options = {});
  // Throws ConfigError for one whose last batch of an epoch is shorter, where stages agree on one shape.
  void set_dataloader(std::shared_ptr<DataLoader> loader);
  void set_dataiterator(pipeline::BatchSource next);
  // Whether this rank has the first stage, and so its inputs; the last one, and so its labels. True without a pipeline.
  bool is_first_stage() const;
  bool is_last_stage() const;
  bool is_pipe_parallel() const { return pipe_parallel_size() > 1; }
  int pipe_parallel_size() const;
  int pipe_parallel_rank() const;
  // What stages send has other shapes from the next batch on.
  void reset_activation_shape();
  // Records when each action of the next batches begins and ends (on an accelerator each then ends with a wait for it);
  // then writes those of the last batch of all ranks to `path`, by rank 0, in Chrome's trace event format, which
  // `ds-tool schedule --measured` draws over the plan. Collective.
  void trace_pipeline(bool on);
  void write_pipeline_trace(const std::string& path);

  // While the returned guard lives, backward() adds to local gradients without any communication, in every stage.
  class NoSync;
  [[nodiscard]] NoSync no_sync();

  void train();
  void eval();
  // Drops the running accumulation: gradients, reduced or not, and the count of its micro-batches. step() does so by
  // itself after an update.
  void zero_grad();

  // --- what happened -----------------------------------------------------------------------------------------------
  // One value per parameter group.
  std::vector<double> get_lr() const;
  // {beta1, beta2} or {momentum, 0} per parameter group; empty with a client optimizer.
  std::vector<std::vector<double>> get_mom() const;
  std::string get_type() const;  // the optimizer's name
  // L2 norm over the whole model before clipping, without loss scale; +inf after an overflow, nullopt before the first
  // step.
  std::optional<double> get_global_grad_norm() const;
  double loss_scale() const;
  bool dynamic_loss_scale() const;
  bool was_step_applied() const;
  // With offload_optimizer.super_offload, of the optimizer steps so far: those whose update on the host began before
  // the gradient was judged, and stood, or had to be undone and done again or skipped; and those that did without.
  struct Speculation {
    int64_t stood = 0, rolled_back = 0, without = 0;
  };
  Speculation speculation() const;

  int64_t global_steps() const;
  int64_t global_samples() const;
  int64_t micro_steps() const;
  int64_t skipped_steps() const;

  // --- batch sizes -------------------------------------------------------------------------------------------------
  int64_t train_batch_size() const;
  int64_t train_micro_batch_size_per_gpu() const;
  int64_t gradient_accumulation_steps() const;
  // Changes gradient_accumulation_steps; throws UsageError unless divisible by micro batch x data-parallel size, and
  // inside an accumulation.
  void set_train_batch_size(int64_t size);
  // Of the engine's loader; stages of a pipeline agree on new shapes with the next batch.
  void set_train_micro_batch_size(int64_t size);

  // --- ranks and parts ---------------------------------------------------------------------------------------------
  int global_rank() const;
  int local_rank() const;
  int world_size() const;
  int dp_world_size() const;
  int mp_world_size() const;
  at::Device device() const;
  int zero_optimization_stage() const;
  const config::DsConfig& config() const;
  const Plan& plan() const;
  const std::shared_ptr<torch::nn::Module>& module() const;
  comm::Communicator& communicator() const;  // over the data-parallel group: ranks with the same part of the model
  comm::Communicator& world() const;         // over all ranks
  // What this rank has handed to others since initialize or the last reset, by all groups of the engine.
  int64_t comm_bytes_sent() const;
  void reset_comm_counters();
  // What initialize returned beside the engine; null where it returned null.
  const std::shared_ptr<optimizers::ShardOptimizer>& optimizer() const;
  const std::shared_ptr<LrScheduler>& lr_scheduler() const;
  const std::shared_ptr<DataLoader>& training_dataloader() const;

  // Waits for parameters still on their way after a step (a forward does it by itself, operator by operator). Needed
  // only before reading parameters' memory directly or from another thread. Collective with delayed_update: waits for
  // the update that runs and publishes it, in place, so not between a forward and its backward. With super_offload it
  // undoes what the host has updated since backward, and step() does that again. So do all calls that read the state.
  // An engine that ends before drops a delayed update, with a warning.
  void synchronize_parameters();
  // Makes these parameters of the model (stage 3: their buckets) whole until the returned scope ends. With
  // `modifier_rank` they may be changed in it: every rank, and the optimizer, goes on from that rank's values.
  // Collective at both ends; throws UsageError for a tensor that is no parameter of the model. See
  // dsengine/zero.h.
  //
  //   { auto whole = engine->gathered_parameters({model->wte->weight}, /*modifier_rank=*/0); ... }
  [[nodiscard]] zero::GatheredParameters gathered_parameters(const std::vector<at::Tensor>& parameters,
                                                             std::optional<int> modifier_rank = std::nullopt);
  // Whole parameters and buffers by name, on the host, in the model's dtype. Collective.
  std::vector<std::pair<std::string, at::Tensor>> module_state_dict();
  // Writes parameters (under all their names) and buffers in the model's dtype to folder/filename, a safetensors file,
  // one parameter at a time, by rank 0; the folder is made when it is missing. Returns the path. Collective; when the
  // file cannot be written, every rank throws (rank 0 the cause, the others IoError) and an older file is left as it
  // was. At stage 3 throws UsageError unless zero_optimization.stage3_gather_16bit_weights_on_model_save is true, as
  // DeepSpeed.
  std::string save_16bit_model(const std::string& folder, const std::string& filename = "model.safetensors",
                               bool exclude_frozen_parameters = false);
  // Whole float32 weights by name, on the host: masters of what is trained (a tied weight once, under its first name),
  // and frozen parameters. Collective.
  std::vector<std::pair<std::string, at::Tensor>> fp32_state_dict();

  // --- checkpoints: docs/checkpoints.md ----------------------------------------------------------------------------
  // Writes all state to <save_dir>/<tag> (default: "global_step<N>"), each rank its part, in one piece or not at all: a
  // folder under that name is complete and on the disk. Returns its path. Collective, between optimizer steps; save_dir
  // must be seen by all hosts. When a rank cannot write, all throw (that rank the cause, the others IoError) and what
  // was in save_dir before is untouched.
  // Asynchronous: returns at once; the state is copied beside the next forward and backward (the next update waits for
  // the copy, which takes as much host memory as the rank's part) and written by a thread. Until the next update,
  // change trained parameters in scopes of gathered_parameters() only: these wait. One save is in
  // flight at a time. A failure is logged by the next save and thrown by wait_for_checkpoint().
  std::string save_checkpoint(const std::string& save_dir, const std::string& tag = "",
                              const SaveOptions& options = {});
  // Returns when the save in flight is published. Throws IoError on all ranks when it failed. Collective.
  void wait_for_checkpoint();
  // Goes on from <load_dir>/<tag>, written by any number of ranks at any stage, precision and offload, or by DeepSpeed.
  // Without a tag: the one that `latest` names or, if that cannot be read, the whole one with the latest step, with an
  // error in the log. Without any, nothing is loaded and the result is empty. Collective, between optimizer steps.
  // Throws UsageError where the checkpoint does not fit the model or the optimizer, before anything is changed. Throws
  // IoError, naming file and tensor, where it is damaged; if that is found when part was loaded, the engine refuses to
  // go on until a load succeeds.
  LoadedCheckpoint load_checkpoint(const std::string& load_dir, const std::string& tag = "",
                                   const LoadOptions& options = {});

  // Moves state from the device to host memory, so that something else can use the device (another model, generation):
  // between two optimizer steps, until reload_states(). In between parameters have no elements, and every call that
  // needs them throws UsageError. What offload_optimizer and offload_param keep elsewhere stays there.
  // Collective. Throws ConfigError on all ranks, and moves nothing, when a host has no room for what its ranks move
  // together. Names are DeepSpeed's.
  void offload_states(OffloadStates states = {});
  void reload_states();
  // Bytes that offload_states() has moved.
  int64_t moved_bytes() const;

  // Bytes of parameters, gradients, master weights and optimizer states this rank holds on the device now, by kind,
  // counted from the tensors themselves.
  struct ModelStateBytes {
    int64_t parameters = 0, gradients = 0, master = 0, optimizer = 0;
    int64_t gathered = 0;   // stage 3: parameters that were whole for operators, at once, at most in the last step
    int64_t secondary = 0;  // zero_hpz_partition_size: slices for the ranks of a node, as long as they are valid
    int64_t total() const { return parameters + gradients + master + optimizer; }
  };
  // Gradients are counted at their peak during the last step. `gathered` and `secondary` come on top of total() during
  // a step.
  ModelStateBytes model_state_bytes() const;
  // What offload_optimizer and offload_param keep in host memory and files; not part of the above.
  zero::OffloadedBytes offloaded_state_bytes() const;

  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  Impl& impl() { return *impl_; }

 private:
  template <class Input>
  Input&& prepared(Input&& input) requires(!std::is_convertible_v<Input, at::Tensor>) {
    return std::forward<Input>(input);
  }
  at::Tensor prepared(const at::Tensor& input) const;
  pipeline::MicroBatch on_device(pipeline::MicroBatch batch) const;

  std::unique_ptr<Impl> impl_;
};

class Engine::NoSync {
 public:
  explicit NoSync(Engine& engine);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Engine& engine_;
};

// The engine outlives the others: they refer to its buckets and its group of ranks.
struct Initialized {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<optimizers::ShardOptimizer> optimizer;  // null with a client optimizer
  std::shared_ptr<DataLoader> loader;                     // null without training_data
  std::shared_ptr<LrScheduler> schedule;                  // null without a scheduler
};

// Reads the config, joins the process group (environment of ds-launch; alone without it), lays the parameters into
// buckets, broadcasts them from rank 0 and returns the parts. Throws ConfigError with every mistake of the config,
// CommError when ranks do not come together or disagree on config or parameters.
Initialized initialize(InitializeOptions options);

}  // namespace ds::engine
