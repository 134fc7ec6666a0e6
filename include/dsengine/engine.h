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
// One Engine belongs to one rank; its methods are called from the thread that made it (UsageError on another one, until
// that calls use_from_this_thread()), in the same order on every rank.
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
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/initialize.h"
#include "dsengine/memory.h"
#include "dsengine/pipeline.h"
#include "dsengine/plan.h"
#include "dsengine/zero.h"

namespace ds::engine {

// Of eval_batch() and offload_states().
using pipeline::EvalOptions;
using pipeline::Evaluation;
using zero::OffloadStates;

// One rank's part of a training run. Made by initialize().
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
  // As out.backward(gradient) of torch: begins at a tensor of any shape, with its gradient, of the same shape, which is
  // scaled as a loss is. The loss of such a step is not known to monitors. Throws UsageError for another shape.
  void backward(const at::Tensor& out, const at::Tensor& gradient, bool retain_graph = false,
                bool scale_wrt_gas = true);
  // Counts one micro-batch; at the gradient accumulation boundary finishes the reductions, clips, updates the
  // parameters, zeroes the gradients and advances the schedule. Throws UsageError when no backward() came before, and
  // NonFiniteError, on all ranks, where a gradient is infinite or NaN and non_finite_gradients makes that an error: the
  // state is then that before the accumulation, and training can go on (docs/non_finite.md). So it is after other
  // exceptions that came before the update; after one that came in the middle of it (a client optimizer that throws, a
  // file that cannot be read) calls throw UsageError until a checkpoint with optimizer states is loaded.
  void step();
  // An optimizer of the program that computes the loss several times in a step, torch::optim::LBFGS: `closure` calls
  // backward(loss) and returns the loss. Returns the first one, the mean over ranks. At stage 0 in float32.
  at::Tensor step(const std::function<at::Tensor()>& closure);
  // What reports call the next micro-batch, in place of samples of the engine's loader. For pipelines in the function
  // that gives micro-batches.
  void name_batch(std::string name);
  bool is_gradient_accumulation_boundary() const;  // whether the next step() updates the parameters
  // Overrides the counted boundary until it is set again; nullopt counts as before (with managed_gradient_accumulation:
  // false every step() is one).
  void set_gradient_accumulation_boundary(std::optional<bool> is_boundary);

  // --- pipelines: a model that is a pipeline::PipelineModule (docs/pipeline.md) ------------------------------------
  // One whole step, from micro-batches to the update; see dsengine/pipeline.h. Collective.
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

  // --- around steps ------------------------------------------------------------------------------------------------
  // While the returned guard lives, backward() adds to local gradients without any communication, in every stage.
  class NoSync {
   public:
    explicit NoSync(Engine& engine);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Engine& engine_;
  };
  [[nodiscard]] NoSync no_sync();

  // Hands the engine over: from now on this thread runs forward and calls its methods. Nobody else uses the engine
  // meanwhile, or has a scope of gathered_parameters() or no_sync() open. With torch_autocast the other thread keeps
  // its state of autocast, and a warning says so.
  void use_from_this_thread();
  // The mode of the module, all layers included.
  void train();
  void eval();
  // Drops the running accumulation: gradients, reduced or not, and the count of its micro-batches. step() does so by
  // itself after an update.
  void zero_grad();

  // --- what happened -----------------------------------------------------------------------------------------------
  std::vector<double> get_lr() const;  // one value per parameter group
  // {beta1, beta2} or {momentum, 0} per parameter group; empty with a client optimizer.
  std::vector<std::vector<double>> get_mom() const;
  std::string get_type() const;  // the optimizer's name
  // L2 norm over the whole model before clipping, without loss scale; +inf after an overflow, nullopt before the first
  // step.
  std::optional<double> get_global_grad_norm() const;
  // 1 where losses are not scaled. On a GPU it may wait for the last step, and take back one that was skipped.
  double loss_scale() const;
  bool dynamic_loss_scale() const;
  // Whether the last step() changed the parameters: not inside an accumulation, nor after an overflow.
  bool was_step_applied() const;
  // Of the updates on the host that ran beside backward.
  using Speculation = zero::Speculation;
  Speculation speculation() const;

  // Since the run's first step, across checkpoints: steps of the optimizer, skipped ones too; samples of all ranks in
  // them, without a running accumulation; micro-batches that step() has counted; steps that were skipped.
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
  int mp_world_size() const;                                       // ranks of the tensor axis
  std::vector<parallel::JoinedOperator> joined_operators() const;  // on split tensors, since initialize()
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
  std::shared_ptr<optimizers::ShardOptimizer> optimizer() const;
  const std::shared_ptr<LrScheduler>& lr_scheduler() const;
  const std::shared_ptr<DataLoader>& training_dataloader() const;

  // Waits for parameters still on their way after a step (a forward does it by itself, operator by operator). Needed
  // only before reading parameters' memory directly or from another thread. Collective with delayed_update: waits for
  // the update that runs and publishes it, in place, so not between a forward and its backward. With super_offload it
  // undoes what the host has updated since backward, and step() does that again. So do all calls that read the state.
  // An engine that ends before drops a delayed update, with a warning.
  void synchronize_parameters();
  // --- one parameter of a partitioned model: DeepSpeed's functions of these names -----------------------------------
  // `parameter` as model->parameters() has it; UsageError for a frozen one or one of another model. All of them are
  // collective: ranks that share the model call them with the same parameter, in the same order. Full values have the
  // parameter's shape, are float32 copies (float64 in a float64 model, here and below) on the engine's device, and are
  // given on every rank; local ones are this rank's part, flat: the elements that it updates, in the parameter's order,
  // perhaps none.
  //
  // Between backward() of the last micro-batch of a step and step(): the mean gradient, without loss scale, before
  // clipping. What is set is what step() uses. (In .grad only stage 0 has it; elsewhere reading that throws, and says
  // so.)
  at::Tensor safe_get_full_grad(const at::Tensor& parameter);
  void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value);
  at::Tensor safe_get_local_grad(const at::Tensor& parameter);
  void safe_set_local_grad(const at::Tensor& parameter, const at::Tensor& value);
  // Likewise: step() scales the gradients to at most this L2 norm over the whole model, then as gradient_clipping says.
  // Returns the norm before. In place of torch::nn::utils::clip_grad_norm_().
  double clip_grad_norm_(double max_norm);  // NOLINT(readability-identifier-naming): torch's name
  // Master weights. With a new value the model's weights change too, at once.
  at::Tensor safe_get_full_fp32_param(const at::Tensor& parameter);
  void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
  at::Tensor safe_get_local_fp32_param(const at::Tensor& parameter);
  void safe_set_local_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
  // "exp_avg", "exp_avg_sq", "momentum_buffer"...; UsageError with the names there are for another one.
  at::Tensor safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state);
  void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);
  at::Tensor safe_get_local_optimizer_state(const at::Tensor& parameter, const std::string& state);
  void safe_set_local_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);

  // --- the whole model ---------------------------------------------------------------------------------------------
  // Makes these parameters of the model whole until the returned scope ends; see dsengine/zero.h. Collective at both
  // ends; throws UsageError for a tensor that is no parameter of the model.
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

  // --- checkpoints: dsengine/checkpoint.h says what they do, docs/checkpoints.md how they are kept ------------------
  // Collective. Returns the path of the tag's folder; empty with checkpoint.writer.type "MOCK", which writes nothing.
  // Inside an accumulation, or between backward() and step(), it saves the state in which that began, without
  // gradients, and warns: a run that loads it begins the accumulation anew.
  std::string save_checkpoint(const std::string& save_dir, const std::string& tag = "",
                              const SaveOptions& options = {});
  // Returns when the save in flight is published. Throws IoError on all ranks when it failed. Collective.
  void wait_for_checkpoint();
  // Collective, between optimizer steps.
  LoadedCheckpoint load_checkpoint(const std::string& load_dir, const std::string& tag = "",
                                   const LoadOptions& options = {});

  // --- memory ------------------------------------------------------------------------------------------------------
  // Moves state to host memory, and back: see zero::OffloadStates. Collective.
  void offload_states(OffloadStates states = {});
  void reload_states();
  int64_t moved_bytes() const;  // by offload_states()

  // What this rank holds on the device now.
  using ModelStateBytes = zero::HeldBytes;
  ModelStateBytes model_state_bytes() const;
  // What offload_optimizer and offload_param keep in host memory and files; not part of the above.
  zero::OffloadedBytes offloaded_state_bytes() const;

  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);  // called by initialize()

 private:
  template <class Input>
  Input&& prepared(Input&& input) requires(!std::is_convertible_v<Input, at::Tensor>) {
    return std::forward<Input>(input);
  }
  at::Tensor prepared(const at::Tensor& input) const;
  pipeline::MicroBatch on_device(pipeline::MicroBatch batch) const;

  friend struct EngineAccess;  // of the functions around engines

  std::unique_ptr<Impl> impl_;
};

// One loss over the models of several engines, their sum or one that runs through all of them, in one pass:
//
//   engine::backward(encoder_loss + decoder_loss, {encoder, decoder});
//   encoder->step();
//   decoder->step();
//
// It is the backward() of each of them, and counts as one in its accumulation. (encoder->backward(loss) alone would
// drop what the loss means for the decoder.) Reductions begin when the pass is over, engine by engine in the order of
// the list, which is the same on all ranks. Engines of one rank and thread, without pipelines. Throws UsageError as
// Engine::backward does, and for engines that scale the loss differently: with other gradient_accumulation_steps
// (unless scale_wrt_gas is false) or another static loss scale. Of dynamic ones the smallest counts, which the others
// take over as theirs where their accumulation begins.
at::Tensor backward(const at::Tensor& loss, const std::vector<std::shared_ptr<Engine>>& engines,
                    bool retain_graph = false, bool scale_wrt_gas = true);

}  // namespace ds::engine
