// A model as a list of layers, of which each rank of a pipeline builds those of its own stages only. Names and meaning
// follow deepspeed.pipe.PipelineModule.
//
//   auto model = std::make_shared<pipeline::PipelineModule>(layers, pipeline::PipelineOptions{.loss = ...});
//   auto [engine, optimizer, loader, schedule] =
//       engine::initialize({.model = model, .config = "ds_config.json", .training_data = dataset});
//   for (...) at::Tensor loss = engine->train_batch();
//
// The layers are built by engine::initialize, which knows the ranks; in a pipeline of one stage a rank builds all of
// them. The names of a layer's parameters begin with the layer's name on every rank, whatever the number of stages, so
// that a checkpoint fits any number of stages.
//
// Engine::train_batch runs one whole step: gradient_accumulation_steps micro-batches through the stages in the order of
// pipeline.schedule, then the update. It returns the mean loss over micro-batches and data-parallel ranks, a float32
// scalar (float64 for a float64 model), on every rank. Collective. Without an argument it takes micro-batches from
// set_dataloader(), set_dataiterator() or the training data of initialize, epoch after epoch. It switches a module in
// evaluation mode to training mode. The engine's backward() and step() throw UsageError. After an error of one rank the
// others wait for its messages until their time limit, or until the launcher ends them. On one rank the batch is then
// dropped; on several ranks of a pipeline later calls throw UsageError.
//
// The program and the engine share the module. It is used on the engine's thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsengine/layer_spec.h"

namespace ds::pipeline {

// The tensors that the first stage takes, and the labels that the loss takes, on any device; the engine moves them.
struct MicroBatch {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> labels;
};

// Returns the next micro-batch of this rank's share of the data. The engine calls it on the ranks of the first and of
// the last stage of a pipeline, and both have to return the same micro-batches.
using BatchSource = std::function<MicroBatch()>;

// The options of Engine::eval_batch.
struct EvalOptions {
  std::optional<int64_t> num_micro_batches;  // empty: gradient_accumulation_steps, as in training
  bool compute_loss = true;
  bool return_logits = false;     // the last layer's outputs
  bool broadcast_logits = false;  // with return_logits: gives them to all ranks of the pipeline
};

// The result of Engine::eval_batch.
struct Evaluation {
  at::Tensor loss;  // the loss as train_batch() returns it; undefined without compute_loss
  // The outputs of the last layer for each micro-batch, with return_logits: on the rank of the last stage, or on all
  // ranks of the pipeline with broadcast_logits. Else empty.
  std::vector<std::vector<at::Tensor>> logits;
};

// A function that computes the mean loss of a micro-batch, a scalar, from the last layer's outputs and the labels.
class LossFunction {
 public:
  LossFunction() = default;
  // `function` takes (outputs, labels) as two tensors, or as two Tensors. In the first form a call with more or fewer
  // than one output and one label throws UsageError.
  template <class Function>
  requires(!std::is_same_v<std::decay_t<Function>, LossFunction>)
      LossFunction(Function function) {  // NOLINT(google-explicit-constructor)
    if constexpr (std::is_invocable_v<Function&, const Tensors&, const Tensors&>) {
      function_ = std::move(function);
    } else {
      function_ = [function](const Tensors& outputs, const Tensors& labels) {
        require_one(outputs, labels);
        return function(outputs[0], labels[0]);
      };
    }
  }
  explicit operator bool() const { return static_cast<bool>(function_); }
  at::Tensor operator()(const Tensors& outputs, const Tensors& labels) const { return function_(outputs, labels); }

 private:
  static void require_one(const Tensors& outputs, const Tensors& labels);
  std::function<at::Tensor(const Tensors&, const Tensors&)> function_;
};

// Options of a PipelineModule. Only the loss has to be given.
struct PipelineOptions {
  LossFunction loss;
  // Where given, these six replace the keys of the same names in the section "pipeline" of the ds_config.
  std::optional<int> stages;            // the number of ranks of the pipeline (it has stages * chunks stages)
  std::optional<std::string> schedule;  // the name of a kind of schedule, or the path of a file (docs/pipeline.md)
  std::optional<int> chunks;            // the number of stages of each rank
  // The weights by which layers are cut into stages: their numbers of parameters ("parameters"), the same for all
  // ("uniform"), layers whose type matches ("type:REGEX"), or measured seconds ("profile").
  std::optional<std::string> partition;
  std::optional<int64_t> activation_checkpoint_interval;  // the layers that backward recomputes together; 0: none
  // Whether layer i is built with the default generators seeded with base_seed + i, so that its first values do not
  // depend on the number of stages.
  std::optional<bool> seed_layers;
  uint64_t base_seed = 1234;
  bool dynamic_shape = false;  // tensors between stages change their shapes from one micro-batch to the next
  Tensors profile_inputs;      // partition "profile": a micro-batch for the first layer, on the CPU
};

// Opaque to programs: where the stages are, and which layers are tied, as the engine has decided.
struct StagePlacement;
struct TiedLayers;

// The module of a pipeline; see the top of this file. Programs use the constructor and forward(), the engine the rest.
class PipelineModule : public torch::nn::Module {
 public:
  // Throws UsageError for no layers, a missing loss, names that two layers share without a key, tied layers of
  // different types or names, and layers that share weights without a key.
  PipelineModule(std::vector<LayerSpec> layers, PipelineOptions options);
  ~PipelineModule() override;

  // The layers and options that it was made from.
  const std::vector<LayerSpec>& layers() const { return layers_; }
  const PipelineOptions& options() const { return options_; }

  // A function that computes region(inputs) and recomputes it in backward instead of keeping its activations.
  using Region = std::function<Tensors(const std::function<Tensors(const Tensors&)>& region, const Tensors& inputs)>;

  // Partitions the layers and builds those of this rank. `checkpoint` runs the layers that are recomputed. Collective
  // over the ranks of the pipeline. Called once, by engine::initialize; UsageError for a second call.
  void build(const StagePlacement& placement, Region checkpoint = {});
  bool built() const { return !bounds_.empty(); }  // whether build() was called
  // The layers of the stages: stage s has those from bounds()[s] up to, not including, bounds()[s + 1].
  const std::vector<int>& bounds() const { return bounds_; }
  // Returns a text for messages: "layers 3 (h.2, gpt::Block) to 5 (h.4, gpt::Block)".
  std::string describe(int stage) const;

  // Runs the layers of one stage, which this rank has. Exceptions of a layer are thrown again as UsageError (IoError
  // and ConfigError keep their type) with stage and layer in the message; CommError, NonFiniteError, InternalError and
  // a lack of memory pass unchanged.
  Tensors forward_stage(int stage, const Tensors& inputs) const;
  // Run all layers. Throw UsageError on a rank that does not have all of them, and before engine::initialize.
  Tensors forward(const Tensors& inputs) const;
  at::Tensor forward(const at::Tensor& input) const;

  // The tied layers that several ranks have, one entry for each key, ordered by key, equal on all ranks.
  const std::vector<TiedLayers>& tied() const { return tied_; }
  // Returns this rank's parameters of the layers of a key; empty where it has none of them.
  std::vector<at::Tensor> tied_parameters(const std::string& key) const;
  // Returns the parameters of a stage's layers; empty where the stage is another rank's.
  std::vector<at::Tensor> parameters_of(int stage) const;
  // The number in the pipeline of each stage's rank.
  const std::vector<int>& placement() const { return rank_of_; }
  // Whether a parameter or buffer of this full name belongs to a layer of another rank.
  bool is_elsewhere(const std::string& name) const;

 private:
  void require_own_weights() const;
  std::vector<double> weights_of_layers(const StagePlacement& placement) const;
  std::vector<double> count_parameters(const StagePlacement& placement) const;
  std::vector<double> measure() const;
  std::shared_ptr<torch::nn::Module> build_layer(size_t index, bool seeded) const;
  void build_own(const StagePlacement& placement);
  void adopt(size_t index, const std::shared_ptr<torch::nn::Module>& module);
  void find_tied(const StagePlacement& placement);
  std::string name_of_layer(size_t index) const;
  std::string text_of_layer(size_t index) const;
  Tensors run_layers(size_t begin, size_t end, const Tensors& inputs, int stage) const;

  std::vector<LayerSpec> layers_;
  PipelineOptions options_;
  std::vector<int> bounds_;
  std::vector<int> rank_of_;
  std::vector<char> own_;                                    // by layer: this rank has built it
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // by own layer; null for functions
  std::vector<TiedLayers> tied_;
  Region checkpoint_;
  int64_t checkpoint_interval_ = 0;
};

}  // namespace ds::pipeline
