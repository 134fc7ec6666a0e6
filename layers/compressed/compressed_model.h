// The compressed layers of a model, and the operators that find them by the tensors that they get.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layers/compressed/compressed_layer.h"
#include "layers/compressed/methods.h"

namespace ds::model_compression {

// A layer whose dimensions follow from another's.
struct RelatedLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;  // Linear, Conv2d or BatchNorm2d
};

// A pruned layer, and those that lose dimensions with it when the model is made small.
struct Cut {
  std::shared_ptr<CompressedLayer> layer;
  Method method = Method::kRowPruning;
  std::vector<RelatedLayer> related;
};

// The calls to the ranks that train the model, which a change of its step needs.
struct RanksOfModel {
  // Calls the function while the parameter is whole on all ranks, the same values.
  std::function<void(const at::Tensor& parameter, const std::function<void()>& use)> with_whole;
  // Largest values over all ranks, in place. Empty: this rank is alone.
  std::function<void(at::Tensor& values)> largest;
};

// Whole, float32 or wider.
struct WeightAndGradient {
  at::Tensor weight;
  at::Tensor gradient;  // of the mean loss of all ranks, as it is before it is clipped
};

class CompressedModel {
 public:
  // Prepares the layers that rules name, in the module's order. Throws ConfigError with the rule's path for a pattern
  // that no layer matches, and where layers do not fit; the module may then have some of the rules' parameters.
  CompressedModel(torch::nn::Module& module, const std::vector<Rule>& rules, uint64_t seed);

  // From now on `step` optimizer steps are done: schedules follow, masks of methods that begin are decided, static
  // ranges move. Collective over the ranks.
  void advance(int64_t step, const RanksOfModel& ranks);
  // Whether masks follow from the gradients of the step that comes ("snip_momentum"): see_gradients() is to be called
  // between its backward and its update, with what gives the values of a weight, and drop_gradients() where no update
  // was made.
  bool needs_gradients() const;
  void see_gradients(const std::function<WeightAndGradient(const at::Tensor& weight)>& values_of);
  void drop_gradients();
  // Whether any rule is "snip_momentum".
  bool follows_gradients() const;
  // Whether its masks should have changed, and no gradient was seen by which to choose.
  bool masks_are_due() const { return masks_are_due_; }
  // Buffers that lose their meaning in 16 bits.
  std::vector<at::Tensor> float32_buffers() const;
  // The next advance() is to another state than that of the last step: what was seen since is of no step.
  void restart();
  // Whether the parameter is scores that a method has registered: weights from elsewhere do not have it.
  bool has_scores(const at::Tensor& parameter) const;

  int64_t step() const { return progress_->step; }
  const std::vector<std::shared_ptr<CompressedLayer>>& layers() const { return layers_; }
  const std::vector<Cut>& cuts() const { return cuts_; }

 private:
  void add_rule(torch::nn::Module& module, const Rule& rule);
  void move_ranges(const RanksOfModel& ranks);
  void prune_blocks(bool jumped);
  void forget_observed();
  void warn_of_unused();
  std::shared_ptr<CompressedLayer> layer_of(const RelatedLayer& found);

  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::vector<std::shared_ptr<CompressedLayer>> layers_;
  std::vector<Cut> cuts_;
  bool looked_for_unused_ = false;
  bool restarted_ = false;
  bool masks_are_due_ = false;  // of "snip_momentum", until a gradient is seen
};

// Keeps the model as that of the module and puts kernels in front of the operators of its layers, for the rest of the
// process: others cost a look into a table. Any thread, while no other one computes with the operators for the first
// model of a kind, as for each registration with LibTorch.
void attach(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<CompressedModel> model);
// The model of the module itself, not of a part of it; null: none.
std::shared_ptr<CompressedModel> find_model(const torch::nn::Module& module);
// A layer of the module whose weight another module, a part of it or one around it, was prepared with; empty: none.
std::string layer_of_another(torch::nn::Module& module);
void detach(torch::nn::Module& module);

// The layer that an operator of this kind with this weight is; null: none. Any thread.
std::shared_ptr<CompressedLayer> find_layer(const at::Tensor& weight, LayerKind kind);

// Finds the layer by its bias, where the layer changes that; null: none. Any thread.
std::shared_ptr<CompressedLayer> find_layer_of_bias(const at::Tensor& bias);

// Puts our kernels in front of those of the operators that compute such layers, for the rest of the process. Each once;
// any thread.
void register_operators_of(const std::vector<std::shared_ptr<CompressedLayer>>& layers);

}  // namespace ds::model_compression
