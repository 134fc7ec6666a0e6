// The tied weights of a pipeline: one weight that layers of several stages use, of which each of their ranks has a
// copy.
//
// Its gradient is added over the ranks that have a copy, TiedWeights::ranks, once the reduction over data-parallel
// ranks is done. model/state/axes.h lists these sums, and model/state/finished_gradients.cc makes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/pipeline.h"

namespace ds::engine {

// The weights of one tie: those of all layers with one LayerSpec::key, or one tensor of an exported model.
struct TiedWeights {
  std::shared_ptr<comm::Communicator> ranks;  // the ranks that have a copy; null on a rank that has none
  std::vector<at::Tensor> parameters;         // this rank's copies; empty: the tie is a buffer
  std::vector<std::string> names;             // the name of their layers, or all names of the tensor
  // Whether this rank's copy counts for the norm of the model and is written to checkpoints.
  bool is_first() const { return ranks && ranks->rank() == 0; }
};

// Returns the ties of a module that is built, in an order that all ranks have, each with a group of its own. Collective
// over `ranks`, the pipeline's.
std::vector<TiedWeights> make_tied_weights(const pipeline::PipelineModule& module, comm::Communicator& ranks);

// Returns the place in `all` of the tie that a parameter or buffer of this name belongs to, of those that this rank
// has; -1: to none.
int tie_of(const std::vector<TiedWeights>& all, const std::string& name);
// Whether a parameter or buffer of this name is a copy of what the first rank of its tie has.
bool is_tied_copy(const std::vector<TiedWeights>& all, const std::string& name);

// Copies tied weights from the first rank of each tie to the others. Collective over the ranks of the pipeline.
void broadcast_tied_weights(const std::vector<TiedWeights>& all);

}  // namespace ds::engine
