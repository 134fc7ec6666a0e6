// The state that a checkpoint keeps of one rank alone: random generators, buffers that differ from rank 0's, a client
// optimizer, tensors that the program gives.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/source/training_state.h"
#include "dsengine/checkpoint.h"
#include "model/checkpoint/host_folders.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Tensors by their paths in the checkpoint; a buffer of the module is "buffers/NAME", or "ranks/R/buffers/NAME".
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Copies the states of this rank's random generators to the host, by path.
NamedTensors generator_states(const ModelState& model);
// Copies to the host what else is this rank's own beside its part of the model state: a client optimizer, which the
// first rank of each folder writes.
NamedTensors rank_tensors(const ModelState& model, const HostFolders& folders);

// Tensors that the program has for this rank alone, by name: SaveOptions::rank_state.
using RankState = std::map<std::string, at::Tensor>;
// Returns them on the host, by path. `copies`: none shares memory with what is given. Throws UsageError, naming the
// tensor, for one that a checkpoint cannot hold.
NamedTensors rank_state_tensors(const ModelState& model, const RankState& given, bool copies);
// Reads what was saved for the rank of this number. `same_ranks`: the checkpoint was written by as many ranks, stages
// and ranks of a tensor axis; throws UsageError where it has any tensors and was not.
RankState read_rank_state(const ModelState& model, checkpoint::Source& source, bool same_ranks);

// Copies of the module's buffers on the host, under the model's names, with checksums as bit patterns.
struct BufferCopies {
  NamedTensors values;
  at::Tensor checksums;
};
// Throws UsageError where the hosts have a folder each and this rank has a buffer of a tied layer.
BufferCopies copy_buffers(const ModelState& model, const HostFolders& folders);
// Adds, by path, the buffers that this rank writes. Those of the first rank with this part of the model are
// everybody's; another rank adds the ones that differ, such as running statistics of its own batches, and a rank that
// does not see the first one's folder adds all of its own. Collective.
void add_buffers(const ModelState& model, const HostFolders& folders, const BufferCopies& copies,
                 NamedTensors& tensors);

// The memory of the optimizer beside its states of elements, and that of gradient_compression, as live references under
// their paths in a checkpoint. optimizer_memory() and compression_memory() are this rank's alone. Shared memory is the
// same on all ranks, and the first one with this part of the model writes it; a shared state named "STATE/PARAMETER"
// belongs to one parameter, lies with its other states, so that any layout finds it, and is written with the
// parameter's bucket.
NamedTensors optimizer_memory(const ModelState& model);
NamedTensors shared_optimizer_memory(const ModelState& model,
                                     const std::function<bool(size_t bucket)>& is_written_here);
NamedTensors compression_memory(const ModelState& model);
// Copies what FP8 layers remember of earlier steps. It is the same on all ranks that have them or parts of them: the
// first of these writes for all.
NamedTensors fp8_memory(const ModelState& model);
// Reads what FP8 layers remember. Layers that the checkpoint does not have begin anew; returns the name of the first
// one, empty: none.
std::string load_fp8_memory(const ModelState& model, checkpoint::Source& source);

// Returns STATE of a shared state "STATE/PARAMETER"; empty: it belongs to no parameter.
std::string state_of_parameter(const std::string& shared_state);
// Reads shared states into the optimizer. `stored`: the name that the checkpoint has for a parameter of the model,
// empty where it has none, whose values stay as they are. Returns what else is missing, and stays; empty: nothing.
std::string load_shared_optimizer_memory(const ModelState& model, checkpoint::Source& source,
                                         const std::function<std::string(const std::string&)>& stored);

// Returns the optimizer's class, as torch names it, and the learning rates of its groups; all else of it is in
// rank_tensors().
checkpoint::OptimizerState client_optimizer_state(const torch::optim::Optimizer& optimizer);

// Returns the path of a buffer of the module in a checkpoint; empty: it has none.
std::string buffer_for(const checkpoint::Source& source, int rank, bool same_ranks, const std::string& name);
// Reads the random generators. `same_ranks`: the checkpoint was written by as many ranks; else generators stay.
void load_generators(const ModelState& model, checkpoint::Source& source, bool same_ranks);
// Throws UsageError when the checkpoint has no state of a client optimizer.
void require_client_optimizer(const ModelState& model, const checkpoint::Source& source);
void load_client_optimizer(const ModelState& model, checkpoint::Source& source);

}  // namespace ds::engine
