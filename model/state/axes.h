// Over which groups of ranks gradients, their squares and counts are added, and which ranks are compared: one list,
// made at setup, with an entry for each axis of the grid of ranks (data, tensor, pipe).
//
// Along the data axis ranks hold the same model, whole or in slices, and see different batches. Along the tensor and
// the pipe axis they hold different parts of it. Whoever adds something up over the model, or compares ranks, goes over
// the list. The gradient sums of tied weights (model/stages/tied_weights.h) are in it, those of the reduction over
// data-parallel ranks are not (zero/reduction).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"

namespace ds::engine {

struct ModelState;
struct TensorParts;

// The ranks over which squares of gradients are added, and the factor by which their sum is multiplied. Null: each rank
// has all squares already.
struct SquareGroup {
  comm::Communicator* ranks = nullptr;
  double factor = 1.0;
};

// A bucket whose gradient is added up over `ranks` after the reduction over data-parallel ranks: a tied weight of
// several stages, or replicated parameters under sequence parallelism.
struct GradientSum {
  size_t bucket = 0;
  comm::Communicator* ranks = nullptr;
  std::string label;
};

// The sums and comparisons along one axis.
struct Axis {
  comm::MeshAxis name = comm::MeshAxis::kData;
  SquareGroup squares;            // for reduced gradients
  SquareGroup local_squares;      // for gradients that the reducer keeps local
  std::vector<GradientSum> sums;  // in an order that all ranks have
  // By trainable bucket: this rank adds it to what is counted once along the axis; empty: it adds all buckets.
  std::vector<char> counts;
  TensorParts* same_data = nullptr;  // the axis whose ranks run on one batch and are compared; null: they are not

  bool counts_bucket(size_t bucket) const { return counts.empty() || counts[bucket] != 0; }
};

// The list, and whether its sums are made.
struct Axes {
  std::vector<Axis> list;  // data first; then tensor and pipe, where the model has them
  bool summed = false;     // all sums have been made since the last backward pass
};

// Makes the list for a model that has its buckets. `state`, to whose parts the list refers, outlives it.
std::unique_ptr<Axes> make_axes(const ModelState& state);

}  // namespace ds::engine
