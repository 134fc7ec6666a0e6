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
// One Engine belongs to one rank. All ranks call its methods in the same order, from the thread that made it (calls
// that train, save, load or read state throw UsageError on another one until that calls use_from_this_thread()).
//
// At stage 3 a parameter has memory only while operators of that thread read it. So forward runs on that thread, all
// ranks run it together, and parameters have no elements once the engine is gone (take module_state_dict() before).
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
#include "dsengine/monitor.h"
#include "dsengine/pipeline.h"
#include "dsengine/plan.h"
#include "dsengine/zero.h"

namespace ds::engine {

// Options and result of eval_batch(), and the argument of offload_states().
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
  // Moves tensors among `inputs` to the engine's device, casts floating-point ones to float16 under fp16.auto_cast, and
  // returns model->forward(inputs...). The model may also be called directly. `model`: a module holder or a pointer.
  template <class Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    return model->forward(prepared(std::forward<Inputs>(inputs))...);
  }
  // Scales the scalar `loss` (by 1/gradient_accumulation_steps unless scale_wrt_gas is false, and by the loss scale),
  // runs autograd, and reduces gradients as they become ready. Returns the loss, detached and divided, but without the
  // loss scale. Several calls before a step() add up. Throws UsageError for a loss that is not a scalar or has no
  // graph. After an exception of autograd on all ranks, call zero_grad() and begin the accumulation anew. After one on
  // this rank alone, end the program, because the other ranks have begun other collectives.
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true);
  void backward(const at::Tensor& sum, int64_t count, bool = false) = delete;  // call backward_mean(sum, count)
  // Takes the sum of the losses of `count` tokens, nodes or labels (0: this rank has none). The step follows the sum of
  // all losses divided by the sum of all counts, over ranks and micro-batches; monitors show it (docs/patterns.md).
  // Returns this micro-batch's mean, detached. UsageError beside backward() in one step, and for pipelines.
  at::Tensor backward_mean(const at::Tensor& sum, double count, bool retain_graph = false);
  // Begins backward at a tensor that is no scalar, as out.backward(gradient) of torch. `gradient` has the shape of
  // `out` (else UsageError) and is scaled as a loss is. Monitors show no loss of such a step.
  void backward(const at::Tensor& out, const at::Tensor& gradient, bool retain_graph = false,
                bool scale_wrt_gas = true);
  // Counts one micro-batch; at the gradient accumulation boundary finishes the reductions, clips, updates the
  // parameters, zeroes the gradients and advances the schedule. UsageError when no backward() came before. Where
  // non_finite_gradients makes it an error, NonFiniteError on all ranks for a gradient that is not finite. A call that
  // is refused changes nothing. Another exception before the update drops the accumulation, and training can go on
  // (docs/non_finite.md), but after CommError. After one inside the update, calls throw until states are loaded.
  void step();
  // Steps a client optimizer that calls `closure` several times, as torch::optim::LBFGS: it calls backward(loss) and
  // returns the loss. Returns the first one, the mean over ranks. Needs stage 0, float32, no clipping or accumulation.
  at::Tensor step(const std::function<at::Tensor()>& closure);
  // Names the next micro-batch in reports, instead of its samples. Call it in the BatchSource of a pipeline.
  void name_batch(std::string name);
  // Gives monitors a value of this step, or of this epoch, averaged over ranks if asked for; see dsengine/monitor.h.
  void log(const std::string& name, double value, const LogOptions& options = {});
  void log(const std::string& name, const at::Tensor& value, const LogOptions& options = {});
  bool is_gradient_accumulation_boundary() const;  // whether the next step() updates the parameters
  // Says, until the next call, whether a micro-batch is the last one before an update. nullopt: the engine counts
  // (with managed_gradient_accumulation false every step() is a boundary).
  void set_gradient_accumulation_boundary(std::optional<bool> is_boundary);
  // --- pipelines: a model that is a pipeline::PipelineModule (docs/pipeline.md) ------------------------------------
  // Runs one whole step, from micro-batches to the update; see dsengine/pipeline.h. Collective.
  at::Tensor train_batch();
  at::Tensor train_batch(const pipeline::BatchSource& next);
  // Runs forwards in evaluation mode; afterwards every module has the mode it had. Collective.
  Evaluation eval_batch(const pipeline::BatchSource& next, const EvalOptions& options = {});
  // Set the source of train_batch(). ConfigError for a shorter last batch where stages agree on one shape.
  void set_dataloader(std::shared_ptr<DataLoader> loader);
  void set_dataiterator(pipeline::BatchSource next);
  // Whether this rank has the first stage (inputs), or the last one (labels). True without a pipeline.
  bool is_first_stage() const;
  bool is_last_stage() const;
  bool is_pipe_parallel() const { return pipe_parallel_size() > 1; }
  int pipe_parallel_size() const;
  int pipe_parallel_rank() const;
  // Has the stages agree on the shapes of activations anew in the next batch.
  void reset_activation_shape();
  // Records when each forward and backward begins and ends, waiting for an accelerator after each; alike on all ranks.
  // write_pipeline_trace() is collective; rank 0 writes its own pipeline's last batch for `ds-tool schedule`.
  void trace_pipeline(bool on);
  void write_pipeline_trace(const std::string& path);
  // --- around steps ------------------------------------------------------------------------------------------------
  // A guard: while it lives, backward() adds to this rank's gradients and reduces nothing, at every stage.
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
  // Hands the engine over to the calling thread, which runs forward and calls its methods from now on. Nobody else uses
  // the engine meanwhile, and no scope is open. With torch_autocast, warns that the old thread keeps its autocast.
  void use_from_this_thread();
  void train();  // sets the mode of the module and all its submodules, as eval() does
  void eval();
  // Drops the running accumulation: its gradients, reduced or not, and its count. step() does it after an update.
  void zero_grad();
  // --- what happened; on a GPU calls may wait for the last step, and take back what it counted if it was skipped ----
  std::vector<double> get_lr() const;  // one value per parameter group
  // Returns {beta1, beta2} or {momentum, 0} per parameter group; empty with a client optimizer.
  std::vector<std::vector<double>> get_mom() const;
  std::string get_type() const;  // the optimizer's name
  // The L2 norm of the last step's gradients over the whole model before clipping, without loss scale; +inf where the
  // step was skipped or an error; nullopt before the first step and where nothing asks for the norm.
  std::optional<double> get_global_grad_norm() const;
  double loss_scale() const;  // 1 where losses are not scaled
  bool dynamic_loss_scale() const;
  // Whether the last step() changed the parameters: false inside an accumulation and after an overflow.
  bool was_step_applied() const;
  using Speculation = zero::Speculation;  // counts of the updates that the host ran beside backward (super_offload)
  Speculation speculation() const;
  // Counts since the run's first step, across checkpoints: optimizer steps, skipped ones too; samples of all ranks in
  // these steps, without a running accumulation; micro-batches that step() has counted; skipped steps.
  int64_t global_steps() const;
  int64_t global_samples() const;
  int64_t micro_steps() const;
  int64_t skipped_steps() const;
  // --- batch sizes -------------------------------------------------------------------------------------------------
  int64_t train_batch_size() const;
  int64_t train_micro_batch_size_per_gpu() const;
  int64_t gradient_accumulation_steps() const;
  // Changes gradient_accumulation_steps so that an update takes `size` samples. UsageError inside an accumulation, and
  // for a size that is no multiple of micro batch x data-parallel size.
  void set_train_batch_size(int64_t size);
  // Changes the batch of the engine's loader; stages of a pipeline agree on new shapes with the next batch.
  void set_train_micro_batch_size(int64_t size);
  // --- ranks and parts ---------------------------------------------------------------------------------------------
  int global_rank() const;
  int local_rank() const;
  int world_size() const;
  int dp_world_size() const;
  int mp_world_size() const;                                       // ranks of the tensor axis
  std::vector<parallel::JoinedOperator> joined_operators() const;  // operators that have gathered split tensors so far
  at::Device device() const;
  int zero_optimization_stage() const;
  const config::DsConfig& config() const;
  const Plan& plan() const;
  const std::shared_ptr<torch::nn::Module>& module() const;
  comm::Communicator& communicator() const;  // over the data-parallel group: of ranks that share a batch, one each
  comm::Communicator& world() const;         // over all ranks
  // Returns the mean over ranks with one part of the model of dense tensors of one shape and dtype, on their device,
  // detached, the same bits on these ranks; integers become float64, 16-bit floating-point numbers float32. Collective.
  at::Tensor mean(const at::Tensor& tensor) const;
  // Returns on all ranks whether any rank has given true, as to stop training early. Collective over world().
  bool agree(bool flag) const;
  // The bytes that this rank has sent since initialize() or the last reset, over all groups of the engine.
  int64_t comm_bytes_sent() const;
  void reset_comm_counters();
  // The objects that initialize() returned beside the engine; null where it returned null.
  std::shared_ptr<optimizers::ShardOptimizer> optimizer() const;
  const std::shared_ptr<LrScheduler>& lr_scheduler() const;
  const std::shared_ptr<DataLoader>& training_dataloader() const;
  // Waits for parameters that are still on their way after a step (a forward does it by itself). Needed only before
  // reading parameters' memory directly or from another thread. With delayed_update it is collective: it waits for the
  // running update and writes it to the parameters in place, so do not call it between a forward and its backward. An
  // update that runs when the engine is destroyed is dropped, with a warning. With super_offload the host may have
  // updated weights in backward(); this call, and those that read weights or states, roll that back; step() repeats it.
  void synchronize_parameters();
  // --- one parameter of a partitioned model: DeepSpeed's functions of these names -----------------------------------
  // `parameter` is one that model->parameters() has; UsageError for a frozen one or one of another model. All are
  // collective, with the same parameter on ranks that share the model. Full values have the parameter's shape, are
  // float32 copies (float64 in a float64 model, here and below) on the engine's device, and are given on every rank.
  // Local values are this rank's shard, flat: the elements that it updates, in the parameter's order, perhaps none.
  //
  // The gradient, between backward() of a step's last micro-batch and step(): the mean over ranks and micro-batches,
  // without loss scale, before clipping. step() uses what is set. UsageError in pipelines.
  at::Tensor safe_get_full_grad(const at::Tensor& parameter);
  void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value);
  at::Tensor safe_get_local_grad(const at::Tensor& parameter);
  void safe_set_local_grad(const at::Tensor& parameter, const at::Tensor& value);
  // Asks step() to clip the gradients of the model to this L2 norm, before gradient_clipping; of several calls the
  // smallest counts. Called after backward() of the step's last micro-batch. Returns the norm before.
  double clip_grad_norm_(double max_norm);  // NOLINT(readability-identifier-naming): torch's name
  // The master weights. Setting them changes the model's weights at once, too.
  at::Tensor safe_get_full_fp32_param(const at::Tensor& parameter);
  void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
  at::Tensor safe_get_local_fp32_param(const at::Tensor& parameter);
  void safe_set_local_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
  // The optimizer state of this name: "exp_avg", "exp_avg_sq", "momentum_buffer"...; UsageError lists them for another.
  at::Tensor safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state);
  void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);
  at::Tensor safe_get_local_optimizer_state(const at::Tensor& parameter, const std::string& state);
  void safe_set_local_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);

  // --- the whole model ---------------------------------------------------------------------------------------------
  // Gathers these parameters until the returned scope ends; see dsengine/zero.h. Collective at both ends; UsageError
  // for a tensor that is no parameter of the model.
  [[nodiscard]] zero::GatheredParameters gathered_parameters(const std::vector<at::Tensor>& parameters,
                                                             std::optional<int> modifier_rank = std::nullopt);
  // Returns full parameters and buffers by name, on the host, in the model's dtype. Collective.
  StateDict module_state_dict();
  // Lets rank 0 write full parameters (under all names) and buffers in the model's dtype to folder/filename, a
  // safetensors file, one parameter at a time; makes a missing folder. Returns the path. Collective; when the file
  // cannot be written, every rank throws (rank 0 the cause, the others IoError) and an older file stays. At stage 3
  // throws UsageError unless stage3_gather_16bit_weights_on_model_save is true. `from`, on each stage's first rank: its
  // values to write, as averaged weights: all parameters, any buffers; UsageError for a wrong or missing name or shape.
  std::string save_16bit_model(const std::string& folder, const std::string& filename = "model.safetensors",
                               bool exclude_frozen_parameters = false,
                               const std::optional<StateDict>& from = std::nullopt);
  // Lets rank 0 write chosen parameters, by default the trained ones (adapters), to a safetensors file for
  // load_weights() and .weights; no others are gathered. Returns the path. Collective; fails as save_16bit_model().
  std::string save_weights(const std::string& path, const SaveWeightsOptions& options = {});
  // Loads the parameters and buffers that `path` has, a file or any path that checkpoint::open() takes; all others and
  // the optimizer's states stay. Every rank reads its parts. `strict`: a tensor that the model lacks is a UsageError,
  // before anything is changed. Collective, between optimizer steps.
  WeightsReport load_weights(const std::string& path, bool strict = true);
  // The names that InitializeOptions::weights and the model did not have in common, over all stages of a pipeline.
  const WeightsReport& start_weights() const;
  // Lets rank 0 write fp32_state_dict(), under all names, and buffers (16 bits as float32) to a file for LibTorch's
  // torch::load(model, path). Returns the path. Collective; fails as save_16bit_model().
  std::string save_fp32_model(const std::string& folder, const std::string& filename = "model.pt");
  // Returns full float32 weights by name, on the host: the masters of trained parameters (a tied weight once, under its
  // first name), and frozen parameters. Collective.
  StateDict fp32_state_dict();

  // --- checkpoints: dsengine/checkpoint.h says what they do, docs/checkpoints.md how they are kept ------------------
  // Saves a checkpoint and returns the path of the tag's folder; empty with checkpoint.writer.type "MOCK". Inside an
  // accumulation it saves the state before it, without gradients, and warns: a load begins it anew. Collective.
  std::string save_checkpoint(const std::string& save_dir, const std::string& tag = "",
                              const SaveOptions& options = {});
  // Returns when the save in flight is published. Throws IoError on all ranks when it failed. Collective.
  void wait_for_checkpoint();
  // Loads a checkpoint. Collective, between optimizer steps.
  LoadedCheckpoint load_checkpoint(const std::string& load_dir, const std::string& tag = "",
                                   const LoadOptions& options = {});
  // --- memory ------------------------------------------------------------------------------------------------------
  // Move state to host memory, and back; see zero::OffloadStates. Collective.
  void offload_states(OffloadStates states = {});
  void reload_states();
  int64_t moved_bytes() const;              // bytes in host memory after offload_states()
  using ModelStateBytes = zero::HeldBytes;  // bytes of model states that this rank holds on the device now
  ModelStateBytes model_state_bytes() const;
  // The bytes that offload_optimizer and offload_param keep in host memory and files; not part of model_state_bytes().
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

  friend struct EngineAccess;  // lets functions around engines see impl_
  std::unique_ptr<Impl> impl_;
};

// Runs backward of one loss over the models of several engines, the sum of their losses or a loss through all of them:
//
//   engine::backward(encoder_loss + decoder_loss, {encoder, decoder});
//   encoder->step();
//   decoder->step();
//
// It takes the place of the backward() of each engine (one alone would drop the others' gradients), and counts as one
// call in its accumulation. Reductions begin when the pass is over, in the order of the list, equal on all ranks. The
// engines belong to one rank and thread, without pipelines. UsageError as Engine::backward, and for engines with other
// gradient_accumulation_steps (unless scale_wrt_gas is false) or static loss scales; of dynamic ones the smallest
// counts.
at::Tensor backward(const at::Tensor& loss, const std::vector<std::shared_ptr<Engine>>& engines,
                    bool retain_graph = false, bool scale_wrt_gas = true);

}  // namespace ds::engine
