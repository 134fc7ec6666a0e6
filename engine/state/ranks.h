// The ranks that an engine's parts talk with, and where this one is among them.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"
#include "engine/state/rank_groups.h"

namespace ds::engine {

struct Ranks {
  std::shared_ptr<comm::Communicator> world;  // all ranks
  std::shared_ptr<comm::Communicator> part;   // those with the same part of the model: data-parallel ranks
  std::shared_ptr<comm::DeviceMesh> mesh;     // of a pipeline; keeps its groups
  RankGroups groups;                          // within `part`
  int local_rank = 0;                         // among those of this host
  c10::Device device = c10::kCPU;

  // The lowest of the ranks with the same part of the model.
  int first_of_part() const { return world->rank() - part->rank(); }
};

}  // namespace ds::engine
