// Slices of parameters in host memory (offload_param: cpu).
#pragma once

#include <memory>
#include <utility>

#include "core/slices/slice_store.h"
#include "offload/pinned_arena.h"

namespace ds::offload {

class ArenaSlices final : public SliceStore {
 public:
  explicit ArenaSlices(std::shared_ptr<PinnedArena> arena) : arena_(std::move(arena)) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return arena_->take(numel, dtype); }

 private:
  std::shared_ptr<PinnedArena> arena_;
};

}  // namespace ds::offload
