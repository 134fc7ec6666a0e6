// The pass of slice_pass-inl.h over masters or states of 16 bits: a block of them is decoded into float32, updated as
// always and encoded again, all of it in the cache. Compiled once per instruction set.
#include <hwy/highway.h>

#include <cstddef>
#include <cstring>

#include "core/numbers/float_formats-inl.h"
#include "optim/kernels/slice_arrays.h"

#if defined(DS_OPTIM_KERNELS_NARROW_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_OPTIM_KERNELS_NARROW_PASS_INL_H_
#undef DS_OPTIM_KERNELS_NARROW_PASS_INL_H_
#else
#define DS_OPTIM_KERNELS_NARROW_PASS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kNarrowBlock = 1024;  // elements: whole vectors
constexpr size_t kMostLanes = HWY_MAX_BYTES / sizeof(float);

// `to` has room for whole vectors.
template <class Format>
void decode_as(const void* array, size_t begin, size_t count, float* to) {
  using Raw = typename Format::Raw;
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const Raw* from = static_cast<const Raw*>(array) + begin;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(Format::load(d, from + i), d, to + i);
  if (i == count) return;
  HWY_ALIGN Raw padded[kMostLanes] = {};
  std::memcpy(padded, from + i, (count - i) * sizeof(Raw));
  hn::StoreU(Format::load(d, padded), d, to + i);
}

template <class Format>
void encode_as(const float* from, size_t count, void* array, size_t begin) {
  using Raw = typename Format::Raw;
  const hn::ScalableTag<float> d;
  const hn::Rebind<Raw, decltype(d)> raw;
  const size_t lanes = hn::Lanes(d);
  Raw* to = static_cast<Raw*>(array) + begin;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(Format::encode(d, hn::LoadU(d, from + i)), raw, to + i);
  if (i == count) return;
  HWY_ALIGN Raw padded[kMostLanes] = {};
  hn::StoreU(Format::encode(d, hn::LoadU(d, from + i)), raw, padded);
  std::memcpy(to + i, padded, (count - i) * sizeof(Raw));
}

inline void decode(FloatFormat type, const void* array, size_t begin, size_t count, float* to) {
  switch (type) {
    case FloatFormat::kFloat32:
      return decode_as<ds::HWY_NAMESPACE::Float32>(array, begin, count, to);
    case FloatFormat::kBFloat16:
      return decode_as<ds::HWY_NAMESPACE::BFloat16>(array, begin, count, to);
    case FloatFormat::kFloat16:
      return decode_as<ds::HWY_NAMESPACE::Float16>(array, begin, count, to);
  }
}

inline void encode(FloatFormat type, const float* from, size_t count, void* array, size_t begin) {
  switch (type) {
    case FloatFormat::kFloat32:
      return encode_as<ds::HWY_NAMESPACE::Float32>(from, count, array, begin);
    case FloatFormat::kBFloat16:
      return encode_as<ds::HWY_NAMESPACE::BFloat16>(from, count, array, begin);
    case FloatFormat::kFloat16:
      return encode_as<ds::HWY_NAMESPACE::Float16>(from, count, array, begin);
  }
}

// Elements `begin` to `end` - 1, by wide_pass(arrays, count) on blocks whose masters and states are float32. What is
// float32 already is updated in its place.
template <class WidePass>
void narrow_pass(const SliceArrays& arrays, size_t begin, size_t end, const WidePass& wide_pass) {
  HWY_ALIGN float master[kNarrowBlock] = {};
  HWY_ALIGN float states[3][kNarrowBlock] = {};
  const bool narrow_master = arrays.master_type != FloatFormat::kFloat32;
  const bool narrow_states = arrays.state_type != FloatFormat::kFloat32;
  for (size_t i = begin; i < end; i += kNarrowBlock) {
    const size_t count = HWY_MIN(kNarrowBlock, end - i);
    SliceArrays block = arrays;
    block.master_type = block.state_type = FloatFormat::kFloat32;
    block.gradient =
        static_cast<const char*>(arrays.gradient) + i * static_cast<size_t>(bytes_of(arrays.gradient_type));
    if (narrow_master) {
      decode(arrays.master_type, arrays.master, i, count, master);
      block.master = master;
      block.copy = nullptr;
    } else {
      block.master = arrays.wide_master() + i;
      if (arrays.copy != nullptr) {
        block.copy = static_cast<char*>(arrays.copy) + i * static_cast<size_t>(bytes_of(arrays.copy_type));
      }
    }
    for (int s = 0; s < 3; ++s) {
      if (arrays.states[s] == nullptr) continue;
      if (narrow_states) decode(arrays.state_type, arrays.states[s], i, count, states[s]);
      block.states[s] = narrow_states ? states[s] : arrays.wide_state(s) + i;
    }
    wide_pass(block, count);
    for (int s = 0; s < 3; ++s) {
      if (narrow_states && arrays.states[s] != nullptr)
        encode(arrays.state_type, states[s], count, arrays.states[s], i);
    }
    if (!narrow_master) continue;
    encode(arrays.master_type, master, count, arrays.master, i);
    if (arrays.copy == nullptr) continue;
    if (arrays.copy_type != arrays.master_type) decode(arrays.master_type, arrays.master, i, count, master);
    encode(arrays.copy_type, master, count, arrays.copy, i);
  }
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
