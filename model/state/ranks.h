// The place of this rank in the grid of ranks, and the groups along its axes. Groups inside the data axis, which share
// buckets, are in rank_groups.h; over which of them gradients are added is in axes.h.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"
#include "model/state/rank_groups.h"

namespace ds::engine {

// The ranks of one model, as one of them has them.
struct Ranks {
  std::shared_ptr<comm::Communicator> world;     // all ranks
  std::shared_ptr<comm::Communicator> part;      // ranks with the same part of the model, over which ZeRO shards states
  std::shared_ptr<comm::Communicator> data;      // of `part`, one of the ranks that share a batch each; else `part`
  std::shared_ptr<comm::Communicator> sequence;  // ranks of `part` that share a batch; null: each has one of its own
  std::shared_ptr<comm::Communicator> tensor;    // ranks with parts of the same parameters; null: parameters are full
  std::shared_ptr<comm::Communicator> layers;    // with `tensor`: the ranks with the same layers; null without
  std::shared_ptr<comm::DeviceMesh> mesh;        // keeps its groups
  RankGroups groups;                             // groups of ranks inside `part`
  std::string tensor_crossing;                   // names two ranks of a tensor axis on different hosts; empty: none are
  bool pipe_inside_host = true;                  // with a tensor axis: every pipeline does
  bool draws_alike_in_sequence = false;          // the engine cuts the batches of an unmodified model
  int local_rank = 0;                            // this rank's number on its host
  c10::Device device = c10::kCPU;

  // Returns the lowest of the ranks with the same part of the model. They are as far apart as a tensor axis is long.
  int first_of_part() const { return world->rank() - part->rank() * tensor_ranks(); }
  // Returns the ranks that hold the same layers, full or as parts over a tensor axis.
  comm::Communicator& layer_ranks() const { return layers ? *layers : *part; }
  // Returns the lowest of layer_ranks().
  int first_of_layer_ranks() const { return world->rank() - layer_ranks().rank(); }
  // Whether this rank does what one rank of each tensor axis does for all of it. True where parameters are full.
  bool is_first_of_tensor_axis() const { return !tensor || tensor->rank() == 0; }
  int tensor_ranks() const { return tensor ? tensor->size() : 1; }
  // Returns the ranks that share a batch, each with a piece of its sequences.
  int sequence_ranks() const { return sequence ? sequence->size() : 1; }
  // Returns this rank's number among those that draw random numbers of their own. Ranks of a tensor axis draw alike.
  // So do those that share a batch where LibTorch's operators draw for split tensors.
  int stream() const { return world->rank() / (tensor_ranks() * (draws_alike_in_sequence ? sequence_ranks() : 1)); }
};

}  // namespace ds::engine
