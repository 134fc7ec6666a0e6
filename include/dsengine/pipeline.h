// A model as a list of layers, of which each rank of a pipeline builds its own stage's only.
// deepspeed.pipe.PipelineModule.
//
//   auto model = std::make_shared<pipeline::PipelineModule>(layers, pipeline::PipelineOptions{.loss = ...});
//   auto [engine, optimizer, loader, schedule] =
//       engine::initialize({.model = model, .config = "ds_config.json", .training_data = dataset});
//   for (...) at::Tensor loss = engine->train_batch();
//
// Nothing is built before engine::initialize, which knows the ranks; with one stage all of it is. A layer's parameters
// bear the layer's name on every rank, whatever the number of stages, so that checkpoints do not depend on it.
//
// Engine::train_batch runs one whole step: gradient_accumulation_steps micro-batches through the stages in the order of
// pipeline.schedule, then the update. Returns the mean loss over micro-batches and data-parallel ranks, a float32
// scalar, on every rank. Collective. Without a source: from set_dataloader(), set_dataiterator() or the training data
// of initialize, epoch after epoch. backward() and step() throw UsageError. Calls train() where the module is in
// evaluation mode. An error of one rank leaves the others waiting for its messages until their time limit or the
// launcher ends them; on one stage the batch is dropped, on several ones later calls throw UsageError.
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

// The tensors that the first stage takes, and the labels that the loss takes.
struct MicroBatch {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> labels;
};

// Gives the next micro-batch of this rank's share of the data. It is asked on the ranks of the first and of the last
// stage, which have to get the same ones.
using BatchSource = std::function<MicroBatch()>;

// The options and the result of Engine::eval_batch.
struct EvalOptions {
  std::optional<int64_t> num_micro_batches;  // default: as in training
  bool compute_loss = true;
  bool return_logits = false;     // the last layer's outputs
  bool broadcast_logits = false;  // with return_logits: to all ranks of the pipeline
};
struct Evaluation {
  at::Tensor loss;  // the loss as train_batch() returns it; undefined without compute_loss
  // With return_logits: the logits of each micro-batch, on the rank of the last stage.
  std::vector<std::vector<at::Tensor>> logits;
};

// The mean loss of a micro-batch, a scalar, from the last layer's outputs and the labels.
class LossFunction {
 public:
  LossFunction() = default;
  // (outputs, labels) as two tensors, or as two Tensors.
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

// The loss is needed; all else has a default.
struct PipelineOptions {
  LossFunction loss;  // from the last layer's outputs and the labels
  // These replace what the section "pipeline" of the ds_config says, where they are given.
  std::optional<int> stages;                              // ranks of the pipeline
  std::optional<std::string> schedule;                    // a kind, or a file (docs/pipeline.md)
  std::optional<int> chunks;                              // stages a rank
  std::optional<std::string> partition;                   // "parameters", "uniform", "type:REGEX", "profile"
  std::optional<int64_t> activation_checkpoint_interval;  // so many layers are recomputed together in backward; 0: none
  std::optional<bool> seed_layers;
  // seed_layers: layer i is built with the default generators seeded with base_seed + i, so that its start values do
  // not depend on the stages.
  uint64_t base_seed = 1234;
  bool dynamic_shape = false;  // tensors between stages change their shapes from one micro-batch to the next
  Tensors profile_inputs;      // partition "profile": a micro-batch for the first layer, on the CPU
};

// Opaque: the stages and their ranks, and the tied layers, as the engine decides.
struct StagePlacement;
struct TiedLayers;

// The module of a pipeline, whose life is told above.
class PipelineModule : public torch::nn::Module {
 public:
  // Throws UsageError for no layers, a missing loss, names that two layers share, and tied layers of different types.
  PipelineModule(std::vector<LayerSpec> layers, PipelineOptions options);
  ~PipelineModule() override;

  // The layers and options that it was made from.
  const std::vector<LayerSpec>& layers() const { return layers_; }
  const PipelineOptions& options() const { return options_; }

  // Computes region(inputs) so that backward computes it again.
  using Region = std::function<Tensors(const std::function<Tensors(const Tensors&)>& region, const Tensors& inputs)>;

  // Partitions the layers and builds those of this rank. Collective over the ranks of the pipeline. Called once, by
  // engine::initialize.
  void build(const StagePlacement& placement, Region checkpoint = {});
  bool built() const { return !bounds_.empty(); }  // build() was called
  // Stage s has layers [bounds()[s], bounds()[s + 1]).
  const std::vector<int>& bounds() const { return bounds_; }
  // "layers 3-5 (h.2 to h.4)"
  std::string describe(int stage) const;

  // Runs the layers of one stage. Throws UsageError naming stage and layer for what its layers throw, but for CommError
  // and memory.
  Tensors forward_stage(int stage, const Tensors& inputs) const;
  // Runs all layers, where one rank has all of them.
  Tensors forward(const Tensors& inputs) const;
  at::Tensor forward(const at::Tensor& input) const;

  // The groups of tied layers, ordered by key, equal on all ranks.
  const std::vector<TiedLayers>& tied() const { return tied_; }
  // The parameters of a key that this rank has; the parameters of a stage's layers, if the stage is this rank's.
  std::vector<at::Tensor> tied_parameters(const std::string& key) const;
  std::vector<at::Tensor> parameters_of(int stage) const;
  // The rank of each stage.
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
