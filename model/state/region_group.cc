#include "model/state/region_group.h"

#include "core/split/split_tensor.h"
#include "parallel/axis/axis.h"
#include "recompute/checkpoint_thread.h"

namespace ds::engine {
namespace {

const comm::Communicator* ranks_of(const at::Tensor& split) {
  return &parallel::axis_of(placement_of(split))->communicator();
}

}  // namespace

RegionGroup::RegionGroup(const std::shared_ptr<comm::Communicator>& axis) : axis_(axis.get()) {
  recompute::add_split_group(axis, &ranks_of);
}

RegionGroup::~RegionGroup() { recompute::remove_split_group(axis_); }

}  // namespace ds::engine
