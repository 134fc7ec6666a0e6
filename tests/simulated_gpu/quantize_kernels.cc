// layers/fp8/quantize_device_kernels.h for the simulated GPU: the same rules, one element or part after the other.
#include <algorithm>
#include <vector>

#include "layers/fp8/quantize_device_kernels.h"
#include "tests/simulated_gpu/kernel_work.h"
#include "tests/simulated_gpu/lone_team.h"

namespace ds::simulated_gpu {
namespace {

using fp8::MatrixParts;
using fp8::QuantizeArrays;
using fp8::WholeTensor;

std::vector<Access> accesses_of_quantize(const QuantizeArrays& arrays, int64_t numel, int64_t inverses) {
  return {access_to(arrays.values, numel * bytes_of(arrays.format), false), access_to(arrays.bits, numel, true),
          access_to(arrays.inverse, inverses * 4, true)};
}

constexpr const char* kQuantize = "quantise to FP8";

template <class Use>
void with_formats(const QuantizeArrays& arrays, const Use& use) {
  with_float_format(arrays.format,
                    [&](auto from) { fp8::with_eight_bits(arrays.to, [&](auto to) { use(from, to); }); });
}

const char* give_whole(const QuantizeArrays& arrays, const WholeTensor& whole, void* stream) {
  std::vector<Access> accesses = accesses_of_quantize(arrays, whole.numel, 1);
  accesses.push_back(access_to(whole.amax, 4, true));
  if (whole.stored != nullptr) accesses.push_back(access_to(whole.stored, 4, false));
  if (whole.record != nullptr) accesses.push_back(access_to(whole.record, 4, true));
  return run_kernel(stream, kQuantize, accesses, [=] {
    with_formats(arrays, [&](auto from, auto to) {
      const fp8::WholeQuantizeRule<decltype(from), decltype(to)> rule(arrays, whole);
      *whole.amax = 0;
      for (int64_t i = 0; i < whole.numel; ++i) *whole.amax = std::max(*whole.amax, rule.template measure<1>(i));
      const float amax = float_of_bits(static_cast<uint32_t>(*whole.amax));
      const float scale = rule.scale(amax);
      *arrays.inverse = fp8::inverse_of_scale(scale, amax);
      fp8::record_amax(whole.record, amax);
      if (rule.stored_is_good(amax)) return;
      for (int64_t i = 0; i < whole.numel; ++i) rule.template settle<1>(i, scale);
    });
  });
}

const char* give_parts(const QuantizeArrays& arrays, const MatrixParts& parts, void* stream) {
  return run_kernel(stream, kQuantize, accesses_of_quantize(arrays, parts.rows * parts.columns, parts.count()), [=] {
    with_formats(arrays, [&](auto from, auto to) {
      const fp8::PartQuantizeRule<decltype(from), decltype(to)> rule(arrays, parts);
      for (int64_t part = 0; part < parts.count(); ++part) rule(part, LoneTeam());
    });
  });
}

const char* give_transpose(const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to, void* stream) {
  return run_kernel(stream, "transpose 8 bits",
                    {access_to(from, rows * columns, false), access_to(to, rows * columns, true)}, [=] {
                      for (int64_t i = 0; i < rows * columns; ++i) to[i % columns * rows + i / columns] = from[i];
                    });
}

constexpr fp8::QuantizeDeviceKernels kQuantizeKernels{give_whole, give_parts, give_transpose};

const bool kQuantizeKernelsRegistered = (set_device_functions(&kQuantizeKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
