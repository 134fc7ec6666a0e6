// Signs of floats as bits, eight to a byte, the first in the lowest bit. Torch-free.
//
// `count` values share one scale, of any sign and also Inf or NaN. A bit is 1 where a value is >= 0 (so -0 has 1, NaN
// has 0) and stands for +scale, else for -scale. Bits beyond `count` in the last byte are written as 0 and never
// read. Each result is one float32 operation, the same on every instruction set. No alignment is asked for.
#pragma once

#include <cstdint>

namespace ds::compression {

// bits = signs of the values, and values -= what the bits stand for.
void encode_signs(float* values, int64_t count, float scale, uint8_t* bits);

// values = what the bits stand for.
void decode_signs(const uint8_t* bits, int64_t count, float scale, float* values);

// values += what the bits stand for.
void add_signs(const uint8_t* bits, int64_t count, float scale, float* values);

}  // namespace ds::compression
