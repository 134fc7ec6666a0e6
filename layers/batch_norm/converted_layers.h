// Which BatchNorm layers compute their statistics over ranks, found by the tensors that the operator gets.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::norm {

// A layer's tensors; undefined where it has none.
struct LayerTensors {
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
};

struct ConvertedLayer {
  std::string name;  // in the module that was converted
  std::weak_ptr<torch::nn::Module> module;
  std::weak_ptr<comm::Communicator> group;
  std::shared_ptr<comm::Communicator> kept;  // the same, where nobody else keeps it
  bool has_ranks = false;                    // false: nobody has said over which ranks
};

// A layer of a module.
struct NamedLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

// Every BatchNorm1d, 2d and 3d in the module.
std::vector<NamedLayer> batch_norms_of(torch::nn::Module& module);
// The tensors of a layer that batch_norms_of() has found.
LayerTensors tensors_of(torch::nn::Module& layer);

// All ranks of `group` as a group of their own, since layers run while gradients are reduced. Collective.
std::shared_ptr<comm::Communicator> group_for_layers(comm::Communicator& group);

// Whose the group is: the layers', until their module is gone, or the caller's, after whose end they cannot train.
enum class GroupOwner { kLayers, kCaller };

// From now on these layers are converted, over `group`; null: over ranks that are given later. Throws UsageError,
// before any change, for one that has no tensors. Any thread.
void convert_layers(const std::vector<NamedLayer>& layers, const std::shared_ptr<comm::Communicator>& group,
                    GroupOwner owner);

// The converted layers of the module for which nobody has said over which ranks, or an engine that has ended.
std::vector<NamedLayer> layers_without_ranks(torch::nn::Module& module);

// From now on these layers compute over all ranks of `ranks`, in a group of their own that the caller keeps; null:
// there are none. Ranks have as many layers. Collective. Throws as convert_layers().
std::shared_ptr<comm::Communicator> give_ranks(const std::vector<NamedLayer>& layers, comm::Communicator& ranks);

// The layer that one of these tensors is of, while its module lives and has it; else null. Any thread.
std::shared_ptr<const ConvertedLayer> find_converted(const at::Tensor& weight, const at::Tensor& running_mean);

// Puts our kernel in front of LibTorch's, for the rest of the process (sync_batch_norm.cc). Layers that are not
// converted are computed by LibTorch as before. Idempotent; any thread.
void register_sync_batch_norm();

}  // namespace ds::norm
