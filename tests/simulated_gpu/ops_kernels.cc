// ops/device_kernels.h for the simulated GPU: the same rules, by a team of lanes that work one after the other.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "ops/device_kernels.h"
#include "ops/kernels/norm_rules.h"
#include "ops/kernels/pack_choice.h"
#include "ops/kernels/rope_rules.h"
#include "ops/kernels/swiglu_rules.h"
#include "tests/simulated_gpu/kernel_work.h"

namespace ds::simulated_gpu {
namespace {

constexpr size_t kLanes = 64;  // two warps

// As row_rules.h says: with the additions that a block of as many threads does.
class LaneTeam {
 public:
  template <class Body>
  void each(int64_t count, const Body& body) const {
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  template <class T, class Body>
  T sum(int64_t count, T start, const Body& body) const {
    std::array<T, kLanes> parts;
    parts.fill(start);
    for (int64_t i = 0; i < count; ++i) {
      T& part = parts[static_cast<size_t>(i) % kLanes];
      part = body(i, part);
    }
    for (size_t lanes = ops::kWarp / 2; lanes > 0; lanes /= 2) {
      const std::array<T, kLanes> before = parts;
      for (size_t lane = 0; lane < kLanes; ++lane) parts[lane] = before[lane] + before[lane ^ lanes];
    }
    T total = parts[0];
    for (size_t warp = ops::kWarp; warp < kLanes; warp += ops::kWarp) total = total + parts[warp];
    return total;
  }
};

// `count` elements, none where there is no array.
void add_array(std::vector<Access>& accesses, const void* data, int64_t count, size_t bytes, bool write) {
  if (data == nullptr || count <= 0) return;
  accesses.push_back(access_to(data, count * static_cast<int64_t>(bytes), write));
}

const char* give_norm_forward(const ops::NormForward& norm, int64_t rows, void* stream) {
  std::vector<Access> accesses;
  const size_t bytes = ops::bytes_of(norm.type);
  const size_t wide = ops::wide_bytes_of(norm.type);
  for (const void* read : {norm.input, norm.residual}) add_array(accesses, read, rows * norm.size, bytes, false);
  for (const void* read : {norm.weight, norm.bias}) add_array(accesses, read, norm.size, wide, false);
  for (const void* written : {norm.sum, norm.output}) add_array(accesses, written, rows * norm.size, bytes, true);
  for (const void* written : {norm.mean, norm.rstd}) add_array(accesses, written, rows, wide, true);
  return run_kernel(stream, "norm", accesses, [=] {
    ops::with_packs(
        norm.type, [&](auto format) { return ops::norm_packs<decltype(format)>(norm); },
        [&](auto format, auto pack) {
          constexpr int kPack = decltype(pack)::value;
          const ops::NormForwardRule<decltype(format), false, kPack> rms(norm);
          const ops::NormForwardRule<decltype(format), true, kPack> centered(norm);
          for (int64_t row = 0; row < rows; ++row) {
            norm.mean == nullptr ? rms(row, LaneTeam()) : centered(row, LaneTeam());
          }
        });
  });
}

// The rows of one block.
template <class Format, int kPack>
void run_norm_block(ops::NormBackward norm, const ops::NormBlocks& blocks, int64_t block) {
  using T = WideOf<Format>;
  for (void** sum : {&norm.weight_gradient, &norm.bias_gradient}) {
    *sum = ops::row_at<ops::WideBits<T>>(*sum, block, norm.size);
    if (*sum != nullptr) std::fill_n(static_cast<T*>(*sum), norm.size, T(0));
  }
  const ops::NormBackwardRule<Format, false, kPack> rms(norm);
  const ops::NormBackwardRule<Format, true, kPack> centered(norm);
  for (int64_t row = block * blocks.length; row < std::min(blocks.rows, (block + 1) * blocks.length); ++row) {
    norm.mean == nullptr ? rms(row, LaneTeam()) : centered(row, LaneTeam());
  }
}

const char* give_norm_backward(const ops::NormBackward& norm, const ops::NormBlocks& blocks, void* stream) {
  std::vector<Access> accesses;
  const size_t bytes = ops::bytes_of(norm.type);
  const size_t wide = ops::wide_bytes_of(norm.type);
  const int64_t all = blocks.rows * norm.size;
  for (const void* read : {norm.output_gradient, norm.sum_gradient, norm.input}) {
    add_array(accesses, read, all, bytes, false);
  }
  add_array(accesses, norm.weight, norm.size, wide, false);
  for (const void* read : {norm.mean, norm.rstd}) add_array(accesses, read, blocks.rows, wide, false);
  add_array(accesses, norm.input_gradient, all, bytes, true);
  for (const void* sums : {norm.weight_gradient, norm.bias_gradient}) {
    add_array(accesses, sums, blocks.blocks * norm.size, wide, true);
  }
  return run_kernel(stream, "gradients of a norm", accesses, [=] {
    ops::with_packs(
        norm.type, [&](auto format) { return ops::norm_packs<decltype(format)>(norm); },
        [&](auto format, auto pack) {
          for (int64_t block = 0; block < blocks.blocks; ++block) {
            run_norm_block<decltype(format), decltype(pack)::value>(norm, blocks, block);
          }
        });
  });
}

// Of the rows' arrays, whose first `reads` are read; what lies between rows counts too.
std::vector<Access> accesses_of_rows(const ops::RowsOf& of, ops::FloatType type, const std::vector<const void*>& arrays,
                                     size_t reads) {
  std::vector<Access> accesses;
  for (size_t a = 0; a < arrays.size(); ++a) {
    add_array(accesses, arrays[a], (of.rows - 1) * of.strides[a] + of.columns, ops::bytes_of(type), a >= reads);
  }
  return accesses;
}

const char* give_swiglu_forward(const ops::SwigluForward& arrays, const ops::RowsOf& of, void* stream) {
  const auto accesses = accesses_of_rows(of, arrays.type, {arrays.gate, arrays.up, arrays.output}, 2);
  return run_kernel(stream, "swiglu", accesses, [=] {
    ops::with_packs(
        arrays.type, [&](auto format) { return ops::swiglu_packs<decltype(format)>(arrays, of); },
        [&](auto format, auto pack) {
          constexpr int kPack = decltype(pack)::value;
          for (int64_t row = 0; row < of.rows; ++row) {
            for (int64_t i = 0; i < of.columns / kPack; ++i) {
              ops::swiglu_forward_pack<decltype(format), kPack>(arrays, of, row, i);
            }
          }
        });
  });
}

const char* give_swiglu_backward(const ops::SwigluBackward& arrays, const ops::RowsOf& of, void* stream) {
  const auto accesses = accesses_of_rows(
      of, arrays.type, {arrays.output_gradient, arrays.gate, arrays.up, arrays.gate_gradient, arrays.up_gradient}, 3);
  return run_kernel(stream, "gradients of swiglu", accesses, [=] {
    ops::with_packs(
        arrays.type, [&](auto format) { return ops::swiglu_packs<decltype(format)>(arrays, of); },
        [&](auto format, auto pack) {
          constexpr int kPack = decltype(pack)::value;
          for (int64_t row = 0; row < of.rows; ++row) {
            for (int64_t i = 0; i < of.columns / kPack; ++i) {
              ops::swiglu_backward_pack<decltype(format), kPack>(arrays, of, row, i);
            }
          }
        });
  });
}

const char* give_rope(const ops::RopeRows& rows, void* stream) {
  std::vector<Access> accesses;
  const auto span = [&](const int64_t* strides) {
    int64_t last = rows.channels;
    for (int dim = 0; dim < 3; ++dim) last += (rows.sizes[dim] - 1) * strides[dim];
    return ops::rope_row_count(rows) == 0 ? 0 : last;
  };
  const int64_t angles = rows.sizes[rows.position_dim] * rows.pairs;
  for (const void* table : {rows.cos, rows.sin}) {
    add_array(accesses, table, angles, ops::wide_bytes_of(rows.type), false);
  }
  add_array(accesses, rows.input, span(rows.input_strides), ops::bytes_of(rows.type), false);
  add_array(accesses, rows.output, span(rows.output_strides), ops::bytes_of(rows.type), true);
  return run_kernel(stream, "rope", accesses, [=] {
    ops::with_packs(
        rows.type, [&](auto format) { return ops::rope_packs<decltype(format)>(rows); },
        [&](auto format, auto pack) {
          constexpr int kPack = decltype(pack)::value;
          for (int64_t row = 0; row < ops::rope_row_count(rows); ++row) {
            const ops::RopeRule<decltype(format), kPack> rule(rows, row);
            for (int64_t item = 0; item < ops::rope_items(rows, kPack); ++item) rule(item);
          }
        });
  });
}

// That of an H100, or what DS_SIMULATED_CAPABILITY says (10 * major + minor).
int simulated_capability(int /*device*/) {
  constexpr int kHopper = 90;
  const char* const given =
      std::getenv("DS_SIMULATED_CAPABILITY");  // NOLINT(concurrency-mt-unsafe): tests set it first
  return given == nullptr ? kHopper : std::atoi(given);
}

constexpr ops::OpsDeviceKernels kOpsKernels{give_norm_forward,    give_norm_backward, give_swiglu_forward,
                                            give_swiglu_backward, give_rope,          simulated_capability};

const bool kOpsKernelsRegistered = (set_device_functions(&kOpsKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
