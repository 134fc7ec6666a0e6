// The ranks that an engine's parts talk with, and where this one is among them.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"
#include "model/state/rank_groups.h"

namespace ds::engine {

struct Ranks {
  std::shared_ptr<comm::Communicator> world;   // all ranks
  std::shared_ptr<comm::Communicator> part;    // those with the same part of the model: data-parallel ranks
  std::shared_ptr<comm::Communicator> tensor;  // those with parts of the same parameters; null: they are whole
  std::shared_ptr<comm::DeviceMesh> mesh;      // keeps its groups
  RankGroups groups;                           // within `part`
  bool tensor_inside_host = true;              // every tensor axis lies inside a host
  int local_rank = 0;                          // among those of this host
  c10::Device device = c10::kCPU;

  // The lowest of the ranks with the same part of the model: they are apart by the ranks of a tensor axis.
  int first_of_part() const { return world->rank() - part->rank() * tensor_ranks(); }
  // The ranks that hold the same layers, full or as parts over a tensor axis: with such an axis, which excludes a
  // pipeline, all ranks.
  comm::Communicator& layer_ranks() const { return tensor ? *world : *part; }
  // The lowest of layer_ranks().
  int first_of_layer_ranks() const { return world->rank() - layer_ranks().rank(); }
  int tensor_ranks() const { return tensor ? tensor->size() : 1; }
  // This rank's place among those that draw random numbers of their own: ranks of a tensor axis draw the same.
  int stream() const { return world->rank() / tensor_ranks(); }
};

}  // namespace ds::engine
