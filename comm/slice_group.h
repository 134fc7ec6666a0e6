// The group of ranks that have the other slices of a parameter of which this rank has one. GradScaler asks it, for it
// judges the gradients of the whole model. Over which groups gradients are added stands in model/state/axes.h.
//
// Whoever slices parameters notes the group. A note ends with its group, or with the next note for the tensor. Any
// thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "dsengine/comm.h"

namespace ds::comm {

// Notes the group of a slice.
void note_slice_group(const at::Tensor& slice, const std::shared_ptr<Communicator>& group);
// Returns the group that was noted; null: none was.
std::shared_ptr<Communicator> slice_group_of(const at::Tensor& parameter);

}  // namespace ds::comm
