// The tensor axis of an engine as the group of activation_checkpointing.partition_activations: checkpointed regions
// that read tensors split over it divide their whole inputs over it, as long as the engine lives. Regions of other
// models, and settings of the program, are left alone.
#pragma once

#include <memory>

#include "dsengine/comm.h"

namespace ds::engine {

// May end on another thread than it was made on.
class RegionGroup {
 public:
  explicit RegionGroup(const std::shared_ptr<comm::Communicator>& axis);
  ~RegionGroup();
  RegionGroup(const RegionGroup&) = delete;
  RegionGroup& operator=(const RegionGroup&) = delete;

 private:
  const comm::Communicator* axis_;  // to compare
};

}  // namespace ds::engine
