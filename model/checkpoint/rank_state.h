// What a checkpoint keeps of one rank alone: random generators, buffers that differ from rank 0's, a client optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/source/training_state.h"
#include "dsengine/checkpoint.h"
#include "model/checkpoint/host_folders.h"
#include "model/state/model_state.h"

namespace ds::engine {

// A buffer of the module under its path in the checkpoint: "buffers/NAME", or "ranks/R/buffers/NAME".
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Copies on the host of the states of this rank's random generators, by path.
NamedTensors generator_states(const ModelState& model);
// Likewise of what else is this rank's own beside its part of the model state: a client optimizer, which the first rank
// of each folder writes.
NamedTensors rank_tensors(const ModelState& model, const HostFolders& folders);

// Copies of the module's buffers on the host, under the model's names, with checksums as bit patterns.
struct BufferCopies {
  NamedTensors values;
  at::Tensor checksums;
};
BufferCopies copy_buffers(const ModelState& model);
// By path: those of the first rank with this part of the model are everybody's; another rank adds those that differ,
// such as running statistics of its own batches, and one that does not see the first one's folder all of its own.
// Collective.
void add_buffers(const ModelState& model, const HostFolders& folders, const BufferCopies& copies,
                 NamedTensors& tensors);

// What the optimizer remembers beside states of elements, and gradient_compression, under its paths in a checkpoint:
// live references. Of this rank alone, and what is the same on all ranks, which the first one with this part of the
// model writes: shared states named "STATE/PARAMETER" are of one parameter and lie with its other states, so that any
// layout finds them; they are written with the parameter's bucket.
NamedTensors optimizer_memory(const ModelState& model);
NamedTensors shared_optimizer_memory(const ModelState& model,
                                     const std::function<bool(size_t bucket)>& is_written_here);
NamedTensors compression_memory(const ModelState& model);
// Copies of what FP8 layers remember of steps before, the same on all ranks: rank 0's stand for all.
NamedTensors fp8_memory(const ModelState& model);
// Layers that the checkpoint has none of begin anew; returns the name of the first, empty: none.
std::string load_fp8_memory(const ModelState& model, checkpoint::Source& source);

// STATE of a shared state "STATE/PARAMETER"; empty: it is of no parameter.
std::string state_of_parameter(const std::string& shared_state);
// Reads shared states into the optimizer. `stored`: the name that the checkpoint has for a parameter of the model,
// empty where it has none, whose values stay as they are. Returns what else is missing, and stays; empty: nothing.
std::string load_shared_optimizer_memory(const ModelState& model, checkpoint::Source& source,
                                         const std::function<std::string(const std::string&)>& stored);

// Its class, as torch names it, and the learning rates of its groups; all else of it is in rank_tensors().
checkpoint::OptimizerState client_optimizer_state(const torch::optim::Optimizer& optimizer);

// The path of a buffer of the module in a checkpoint; empty: it has none.
std::string buffer_for(const checkpoint::Source& source, int rank, bool same_ranks, const std::string& name);
// Generators and client optimizer. `same_ranks`: the checkpoint was written by as many ranks; else generators stay.
void load_generators(const ModelState& model, checkpoint::Source& source, bool same_ranks);
// Throws UsageError when the checkpoint has no state of a client optimizer.
void require_client_optimizer(const ModelState& model, const checkpoint::Source& source);
void load_client_optimizer(const ModelState& model, checkpoint::Source& source);

}  // namespace ds::engine
