// A rank's slices as leaf tensors: what an optimizer of the program works on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/slices/segment.h"
#include "model/state/model_state.h"

namespace ds::loops {

// This rank's part of a trained parameter: a flat view of the master of its bucket, perhaps without elements.
struct SliceLeaf {
  std::string name;
  size_t parameter = 0;  // its number in the model
  size_t bucket = 0;
  Segment place;  // in the slice
  at::Tensor tensor;
};

// One for each trained parameter, in module order, the same on every rank but for their places.
std::vector<SliceLeaf> slice_leaves(const engine::ModelState& state);

}  // namespace ds::loops
