// BatchNorm over the batches of all data-parallel ranks: torch's convert_sync_batchnorm, also on the CPU.
//
//   auto model = ResNet18();
//   ds::convert_sync_batchnorm(*model);               // over the data ranks of the engine that trains it
//   ds::convert_sync_batchnorm(*model, *job.ranks);   // or, in a loop of one's own, over these ranks
//
// The module stays as it is. Members of a LibTorch module have their types, so nothing can be exchanged in it: a
// converted layer is known by its tensors, and it is the operator batch_norm that computes otherwise when it gets them.
// The layers of an exported model (dsengine/exported_model.h) with running statistics are known by the names of these.
// With the first conversion of a process a kernel is registered for that operator, which costs other layers a look into
// a table; before, nothing.
//
// In training a converted layer normalizes with mean and variance of the joined batch of all ranks, each element
// counted once: ranks may have batches of different sizes, also empty ones. Gradients are those of one process with the
// joined batch; weight and bias get this rank's share, which the reduction of gradients adds up. Running statistics
// become the same on all ranks, with the unbiased variance of the joined batch. Statistics are computed in float32 or
// wider. In evaluation, and where one rank is alone, nothing is exchanged, and LibTorch computes. What is computed
// again by activation checkpointing exchanges again, and counts once; layers that are not converted count it twice in
// their running statistics, as in torch.
//
// Per layer and step: one all-gather of 2 C + 1 numbers in forward, one all-reduce of 2 C in backward, both awaited.
// All ranks therefore run the converted layers in the same order; the collectives carry the layers' names.
//
// LibTorch itself refuses a rank with one value per channel (BatchNorm1d on one sample) before the operator is called.
// Code that calls native_batch_norm or cudnn_batch_norm with a layer's tensors is not seen. A clone() of a module is
// not converted, nor is a layer whose weight and running mean the program has replaced by other tensors. Only first
// derivatives: over several ranks a backward pass with create_graph throws UsageError.
#pragma once

#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace torch::nn {
class Module;
}

namespace ds {

// Converts each BatchNorm1d, BatchNorm2d and BatchNorm3d in `module`, and itself; returns their names, in its order.
// Over the ranks of `group`, of which the layers take a group of their own: collective over `group`. Converting again
// replaces the ranks. The module must be held by a shared_ptr (any ModuleHolder does). Throws UsageError for a layer
// with neither weight nor running statistics, which cannot be known by its tensors, and leaves all layers as they were.
std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module, comm::Communicator& group);
// Converts them over the data ranks of the engine, or of the wrapper, that takes the module later. A forward pass in
// training throws UsageError before, and after the engine's end until another takes the module.
std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module);

}  // namespace ds
