// The tensor axis of an engine as the group of activation_checkpointing.partition_activations: checkpointed regions of
// the thread that made the engine divide their whole inputs over it, as long as the engine lives.
#pragma once

#include <memory>

#include "dsengine/comm.h"

namespace ds::engine {

class RegionGroup {
 public:
  explicit RegionGroup(const std::shared_ptr<comm::Communicator>& axis);
  // Where another group was set since, that one stays.
  ~RegionGroup();
  RegionGroup(const RegionGroup&) = delete;
  RegionGroup& operator=(const RegionGroup&) = delete;

 private:
  const comm::Communicator* axis_;  // to compare
};

// In this thread's settings the axis of an engine that ended on another thread would stay.
void forget_region_group();

}  // namespace ds::engine
