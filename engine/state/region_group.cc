#include "engine/state/region_group.h"

#include <utility>

#include "dsengine/activation_checkpoint.h"

namespace ds::engine {
namespace {

thread_local const comm::Communicator* set_here = nullptr;  // by an engine

void set_group(const std::shared_ptr<comm::Communicator>& group) {
  recompute::CheckpointOptions options = recompute::checkpoint_options();
  options.tensor_parallel_group = group;
  recompute::configure_checkpointing(options);
}

void drop_group(const comm::Communicator* axis) {
  if (axis != nullptr && recompute::checkpoint_options().tensor_parallel_group.get() == axis) set_group(nullptr);
}

}  // namespace

RegionGroup::RegionGroup(const std::shared_ptr<comm::Communicator>& axis) : axis_(axis.get()) {
  set_group(axis);
  set_here = axis_;
}

RegionGroup::~RegionGroup() { drop_group(axis_); }

void forget_region_group() { drop_group(std::exchange(set_here, nullptr)); }

}  // namespace ds::engine
