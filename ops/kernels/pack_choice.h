// How many elements a device reads at once of arrays of an operator: kWholePack where all of them allow it, else one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "ops/kernels/norm_kernel.h"
#include "ops/kernels/rope_kernel.h"
#include "ops/kernels/row_rules.h"
#include "ops/kernels/swiglu_rules.h"

namespace ds::ops {

// Whether packs of `pack` elements of `bytes` bytes lie aligned in rows that begin at multiples of `stride` elements.
inline bool packs_fit(const void* data, int64_t stride, int pack, size_t bytes) {
  return packs_lie_aligned(data, pack, bytes) && stride % pack == 0;
}

template <class Format>
bool norm_packs(int64_t size, std::initializer_list<const void*> rows, std::initializer_list<const void*> wide_rows) {
  constexpr int kPack = kWholePack<Format>;
  bool fit = size % kPack == 0;
  for (const void* row : rows) fit = fit && packs_fit(row, size, kPack, sizeof(typename Format::Bits));
  for (const void* row : wide_rows) fit = fit && packs_fit(row, size, kPack, sizeof(WideOf<Format>));
  return fit;
}

template <class Format>
bool norm_packs(const NormForward& norm) {
  return norm_packs<Format>(norm.size, {norm.input, norm.residual, norm.sum, norm.output}, {norm.weight, norm.bias});
}

template <class Format>
bool norm_packs(const NormBackward& norm) {
  return norm_packs<Format>(norm.size, {norm.output_gradient, norm.sum_gradient, norm.input, norm.input_gradient},
                            {norm.weight, norm.weight_gradient, norm.bias_gradient});
}

template <class Format>
bool row_packs(const RowsOf& of, std::initializer_list<const void*> arrays) {
  constexpr int kPack = kWholePack<Format>;
  bool fit = of.columns % kPack == 0;
  const int64_t* stride = of.strides;
  for (const void* array : arrays) fit = fit && packs_fit(array, *stride++, kPack, sizeof(typename Format::Bits));
  return fit;
}

template <class Format>
bool swiglu_packs(const SwigluForward& arrays, const RowsOf& of) {
  return row_packs<Format>(of, {arrays.gate, arrays.up, arrays.output});
}

template <class Format>
bool swiglu_packs(const SwigluBackward& arrays, const RowsOf& of) {
  return row_packs<Format>(of,
                           {arrays.output_gradient, arrays.gate, arrays.up, arrays.gate_gradient, arrays.up_gradient});
}

template <class Format>
bool rope_packs(const RopeRows& rows) {
  constexpr int kPack = kWholePack<Format>;
  bool fit = rows.pairs % kPack == 0 && packs_fit(rows.cos, rows.pairs, kPack, sizeof(WideOf<Format>)) &&
             packs_fit(rows.sin, rows.pairs, kPack, sizeof(WideOf<Format>));
  for (int dim = 0; dim < 3; ++dim) {
    fit = fit && packs_fit(rows.input, rows.input_strides[dim], kPack, sizeof(typename Format::Bits)) &&
          packs_fit(rows.output, rows.output_strides[dim], kPack, sizeof(typename Format::Bits));
  }
  return fit;
}

// use(format, pack), the latter a std::integral_constant: with whole packs where `fits(format)`.
template <int kElements>
using PackOf = std::integral_constant<int, kElements>;

template <class Fits, class Use>
auto with_packs(FloatType type, const Fits& fits, const Use& use) {
  const auto choose = [&](auto format) {
    using Format = decltype(format);
    return fits(format) ? use(format, PackOf<kWholePack<Format>>()) : use(format, PackOf<1>());
  };
  switch (type) {
    case FloatType::kBFloat16:
      return choose(BFloat16Bits());
    case FloatType::kFloat16:
      return choose(Float16Bits());
    case FloatType::kFloat64:
      return choose(Float64Bits());
    case FloatType::kFloat32:
      break;
  }
  return choose(Float32Bits());
}

}  // namespace ds::ops
