// The axes of the grid of ranks that hold one model, asked once: a list that setup makes, with an entry for each axis
// along which this rank's part of the model differs from that of others. Whoever adds something up over the model, or
// compares ranks of it, goes over the list.
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

// The ranks over which squares of gradients are added, and the factor by which the sum is multiplied then. Null: each
// rank has all squares already.
struct SquareGroup {
  comm::Communicator* ranks = nullptr;
  double factor = 1.0;
};

// A bucket whose gradient is to be added up over `ranks` after the reduction over data-parallel ranks.
struct GradientSum {
  size_t bucket = 0;
  comm::Communicator* ranks = nullptr;
  std::string label;
};

struct Axis {
  comm::MeshAxis name = comm::MeshAxis::kData;
  SquareGroup squares;               // of reduced gradients
  SquareGroup local_squares;         // of gradients that the reducer keeps local
  std::vector<GradientSum> sums;     // in the order that all ranks have
  std::vector<char> counts;          // by trainable bucket: this rank stands for it along the axis; empty: for all
  TensorParts* same_data = nullptr;  // ranks along the axis run one program on one batch, and are compared; null: not

  bool counts_bucket(size_t bucket) const { return counts.empty() || counts[bucket] != 0; }
};

struct Axes {
  std::vector<Axis> list;  // data, tensor, pipe
  bool summed = false;     // all `sums` have been made since the last backward pass
};

// Makes the list of a model that has its buckets. `state`, whose parts it refers to, outlives the result.
std::unique_ptr<Axes> make_axes(const ModelState& state);

}  // namespace ds::engine
