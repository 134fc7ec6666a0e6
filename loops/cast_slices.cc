#include "loops/cast_slices.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include "core/memory/storage_memory.h"

namespace ds::loops {

at::Tensor CastSlices::allocate(int64_t numel, at::ScalarType dtype) {
  uses_ = 1;
  return at::empty({numel}, master_.options().dtype(dtype));
}

void CastSlices::load(const at::Tensor& slice) {
  if (uses_++ > 0) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  const size_t bytes = static_cast<size_t>(slice.numel()) * slice.element_size();
  give_storage(slice, c10::GetAllocator(slice.device().type())->allocate(bytes), bytes);
  at::Tensor(slice).copy_(master_);
}

void CastSlices::unload(const at::Tensor& slice, bool changed) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  if (changed && made_) {
    const at::Tensor stays = master_.to(slice.scalar_type()).eq(slice);
    master_.copy_(at::where(stays, master_, slice.to(master_.scalar_type())));
  }
  made_ = true;
  if (--uses_ == 0) take_storage(slice);
}

at::Tensor HostSlices::allocate(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(pinned_));
}

}  // namespace ds::loops
