// compression/sign_device_kernels.h for the simulated GPU: the sums and tables of compression/cuda/sign_kernels.cu, one
// element after the other.
#include "compression/sign_device_kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulated_gpu/kernel_work.h"

namespace ds::simulated_gpu {
namespace {

using compression::kSignPart;
using compression::kSignTile;
using compression::SignDeviceRanges;

constexpr size_t kThreads = 256;  // of a block
constexpr size_t kWarp = 32;
constexpr int64_t kGap = -1;  // in place of a range

int64_t sign_tiles(const SignDeviceRanges& ranges) { return (ranges.numel + kSignTile - 1) / kSignTile; }

// use(i, range or kGap) for each element.
template <class Use>
void for_each_sign(const SignDeviceRanges& ranges, const Use& use) {
  for (int64_t tile = 0; tile < sign_tiles(ranges); ++tile) {
    int64_t range = ranges.first_ranges[tile];
    const int64_t last = ranges.first_ranges[tile + 1];
    const int64_t tile_end = std::min(ranges.numel, (tile + 1) * kSignTile);
    for (int64_t i = tile * kSignTile; i < tile_end; ++i) {
      while (range < last && ranges.ends[range] <= i) ++range;
      use(i, range < ranges.count && ranges.begins[range] <= i ? range : kGap);
    }
  }
}

// The sum of term(i), i in [begin, end), in the order of a block: its threads take turns, then a tree for each warp.
template <class Term>
double sum_of_block(int64_t begin, int64_t end, const Term& term) {
  std::array<double, kThreads> sums{};
  for (int64_t i = begin; i < end; ++i) sums[static_cast<size_t>(i - begin) % kThreads] += term(i);
  double total = 0;
  for (size_t warp = 0; warp < kThreads; warp += kWarp) {
    for (size_t distance = kWarp / 2; distance > 0; distance /= 2) {
      for (size_t lane = warp; lane < warp + distance; ++lane) sums[lane] += sums[lane + distance];
    }
    total += sums[warp];
  }
  return total;
}

void sum_sign_parts(const SignDeviceRanges& ranges, const float* values, double* sums) {
  for (int64_t part = 0; part < ranges.parts; ++part) {
    const int64_t* const ends = ranges.first_parts + 1;
    const int64_t range = std::upper_bound(ends, ends + ranges.count, part) - ends;
    const int64_t begin = ranges.begins[range] + (part - ranges.first_parts[range]) * kSignPart;
    sums[part] = sum_of_block(begin, std::min(ranges.ends[range], begin + kSignPart), [&](int64_t i) {
      const double value = values[i];
      return value * value;
    });
  }
}

void find_sign_scales(const SignDeviceRanges& ranges, const double* sums, float* scales) {
  for (int64_t range = 0; range < ranges.count; ++range) {
    const double sum = sum_of_block(ranges.first_parts[range], ranges.first_parts[range + 1],
                                    [&](int64_t part) { return sums[part]; });
    const int64_t length = std::max<int64_t>(1, ranges.ends[range] - ranges.begins[range]);
    scales[range] = static_cast<float>(std::sqrt(sum / static_cast<double>(length)));
  }
}

void encode_signs(const SignDeviceRanges& ranges, float* values, const float* scales, uint8_t* bits) {
  for_each_sign(ranges, [&](int64_t i, int64_t range) {
    const bool plus = range != kGap && values[i] >= 0.0F;
    if (i % 8 == 0) bits[i / 8] = 0;
    if (plus) bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1U << (i % 8));
    if (range != kGap) values[i] -= plus ? scales[range] : -scales[range];
  });
}

float meaning_of_sign(const uint8_t* bits, int64_t i, float scale) {
  return (bits[i / 8] >> (i % 8) & 1) != 0 ? scale : -scale;
}

void decode_signs(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values) {
  for_each_sign(ranges, [&](int64_t i, int64_t range) {
    values[i] = range == kGap ? 0.0F : meaning_of_sign(bits, i, scales[range]);
  });
}

void add_signs(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values) {
  for_each_sign(ranges, [&](int64_t i, int64_t range) {
    if (range != kGap) values[i] += meaning_of_sign(bits, i, scales[range]);
  });
}

template <class Element>
Access elements(const Element* data, int64_t count, bool write) {
  return access_to(data, count * static_cast<int64_t>(sizeof(Element)), write);
}

Access bytes_of_signs(const SignDeviceRanges& ranges, const uint8_t* bits, bool write) {
  return elements(bits, (ranges.numel + 7) / 8, write);
}

const char* give_kernel(void* stream, std::string name, const SignDeviceRanges& ranges, std::vector<Access> accesses,
                        std::function<void()> run) {
  accesses.push_back(elements(ranges.begins, ranges.count, false));
  accesses.push_back(elements(ranges.ends, ranges.count, false));
  accesses.push_back(elements(ranges.first_parts, ranges.count + 1, false));
  accesses.push_back(elements(ranges.first_ranges, sign_tiles(ranges) + 1, false));
  return run_kernel(stream, std::move(name), accesses, std::move(run));
}

const char* give_scales(const SignDeviceRanges& ranges, const float* values, double* sums, float* scales,
                        void* stream) {
  give_kernel(stream, "sums of SignCodec", ranges,
              {elements(values, ranges.numel, false), elements(sums, ranges.parts, true)},
              [=] { sum_sign_parts(ranges, values, sums); });
  return give_kernel(stream, "scales of SignCodec", ranges,
                     {elements(sums, ranges.parts, false), elements(scales, ranges.count, true)},
                     [=] { find_sign_scales(ranges, sums, scales); });
}

const char* give_encode(const SignDeviceRanges& ranges, float* values, const float* scales, uint8_t* bits,
                        void* stream) {
  return give_kernel(
      stream, "encode of SignCodec", ranges,
      {elements(values, ranges.numel, true), elements(scales, ranges.count, false), bytes_of_signs(ranges, bits, true)},
      [=] { encode_signs(ranges, values, scales, bits); });
}

const char* give_decode(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                        void* stream) {
  return give_kernel(stream, "decode of SignCodec", ranges,
                     {bytes_of_signs(ranges, bits, false), elements(scales, ranges.count, false),
                      elements(values, ranges.numel, true)},
                     [=] { decode_signs(ranges, bits, scales, values); });
}

const char* give_add(const SignDeviceRanges& ranges, const uint8_t* bits, const float* scales, float* values,
                     void* stream) {
  return give_kernel(stream, "add of SignCodec", ranges,
                     {bytes_of_signs(ranges, bits, false), elements(scales, ranges.count, false),
                      elements(values, ranges.numel, true)},
                     [=] { add_signs(ranges, bits, scales, values); });
}

constexpr compression::SignDeviceKernels kSignKernels{give_scales, give_encode, give_decode, give_add};

const bool kSignKernelsRegistered = (set_device_functions(&kSignKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
