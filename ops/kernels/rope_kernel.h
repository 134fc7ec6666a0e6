// Rotary position embedding (RoFormer, arXiv:2104.09864): pairs of channels (a, b) become (a c - b s, b c + a s), c and
// s the cosine and sine of an angle of the position. Torch-free.
#pragma once

#include <cstdint>

#include "core/numbers/float_bits.h"
#include "ops/kernels/float_type.h"

namespace ds::ops {

// Three dimensions of rows; a row is contiguous.
struct RopeRows {
  FloatType type = FloatType::kFloat32;
  bool interleaved = false;  // pairs are (0, 1), (2, 3), ...; otherwise (0, pairs), (1, pairs + 1), ...
  bool backward = false;     // the opposite rotation
  int64_t sizes[3] = {1, 1, 1};
  int64_t input_strides[3] = {0, 0, 0};  // elements
  int64_t output_strides[3] = {0, 0, 0};
  int64_t position_dim = 0;  // which of the three counts positions
  int64_t pairs = 0;         // the first 2 `pairs` channels are rotated, the others copied
  int64_t channels = 0;
  const void* cos = nullptr;  // wide [positions, pairs], contiguous; as sin
  const void* sin = nullptr;
  const void* input = nullptr;
  void* output = nullptr;
};

// Where a row lies, in elements of the arrays, and at which position.
struct RopePlace {
  int64_t input = 0;
  int64_t output = 0;
  int64_t position = 0;
};

DS_HOST_DEVICE inline RopePlace place_of(const RopeRows& rows, int64_t row) {
  const int64_t index[3] = {row / (rows.sizes[1] * rows.sizes[2]), row / rows.sizes[2] % rows.sizes[1],
                            row % rows.sizes[2]};
  RopePlace place;
  for (int dim = 0; dim < 3; ++dim) {
    place.input += index[dim] * rows.input_strides[dim];
    place.output += index[dim] * rows.output_strides[dim];
  }
  place.position = index[rows.position_dim];
  return place;
}

// Rows `begin` to `end` - 1 of all, the last dimension counts fastest.
void rope_rows(const RopeRows& rows, int64_t begin, int64_t end);

}  // namespace ds::ops
