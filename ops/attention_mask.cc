#include "ops/attention_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::ops {
namespace {

// Without the repetition of expanded dimensions; the last one stays.
at::Tensor unexpanded(at::Tensor mask) {
  for (int64_t dim = 0; dim + 1 < mask.dim(); ++dim) {
    if (mask.stride(dim) == 0 && mask.size(dim) > 1) mask = mask.narrow(dim, 0, 1);
  }
  return mask;
}

at::Tensor added(const char* name, const char* what, const at::Tensor& mask, MaskMode mode, at::ScalarType type) {
  require(!mask.requires_grad(), name, ": ", what, " requires a gradient, and masks get none; give mask.detach()");
  if (mode == MaskMode::kAdd) {
    require(
        mask.scalar_type() != at::kBool, name, ": ", what,
        ": expected numbers to add to scores, found Bool; give its mode as kMultiply, where false leaves a key out");
    return mask.to(type);
  }
  return at::zeros(mask.sizes(), mask.options().dtype(type))
      .masked_fill(mask == 0, -std::numeric_limits<double>::infinity());
}

}  // namespace

void check_masks(const char* name, at::IntArrayRef sizes, const at::Device& device,
                 const SparseAttentionOptions& options) {
  const int64_t time = sizes[2];
  if (const at::Tensor& mask = options.key_padding_mask; mask.defined()) {
    require(mask.dim() == 2 && mask.size(0) == sizes[0] && mask.size(1) == time && mask.device() == device, name,
            ": key_padding_mask: expected [batch, time] = [", sizes[0], ", ", time, "] on ", device, ", found ",
            describe(mask));
  }
  if (const at::Tensor& mask = options.attention_mask; mask.defined()) {
    const auto one_or = [&](int64_t dim) { return mask.size(dim) == 1 || mask.size(dim) == sizes[dim]; };
    const bool fits = (mask.dim() == 2 || (mask.dim() == 4 && one_or(0) && one_or(1))) && mask.size(-1) == time &&
                      mask.size(-2) == time && mask.device() == device;
    require(fits, name, ": attention_mask: expected [time, time] or [batch or 1, heads or 1, time, time] of [",
            sizes[0], ", ", sizes[1], ", ", time, ", ", time, "] on ", device, ", found ", describe(mask));
  }
}

AddedMasks added_masks(const char* name, const SparseAttentionOptions& options, at::ScalarType type) {
  AddedMasks masks;
  if (const at::Tensor& mask = options.key_padding_mask; mask.defined()) {
    masks.keys = added(name, "key_padding_mask", mask, options.key_padding_mask_mode, type).contiguous();
  }
  if (const at::Tensor& mask = options.attention_mask; mask.defined()) {
    at::Tensor own = added(name, "attention_mask", unexpanded(mask), options.attention_mask_mode, type);
    if (own.stride(-1) != 1) own = own.contiguous();
    const at::Tensor whole = own.expand(mask.sizes());
    masks.scores = whole.dim() == 2 ? whole.unsqueeze(0).unsqueeze(0) : whole;
  }
  return masks;
}

}  // namespace ds::ops
