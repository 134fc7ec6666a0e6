// Which ranks have the other slices of a parameter that this rank has a slice of: what judges all gradients of a model,
// as a loss scaler does, asks them too.
//
// Whoever slices parameters notes it; a note ends with the group, or with the next one of the same tensor. From any
// thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "dsengine/comm.h"

namespace ds::comm {

void note_slice_group(const at::Tensor& slice, const std::shared_ptr<Communicator>& group);
// Null: nobody has noted one.
std::shared_ptr<Communicator> slice_group_of(const at::Tensor& parameter);

}  // namespace ds::comm
