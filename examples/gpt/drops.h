// The parts of the blocks that a training step leaves out: whole blocks (progressive_layer_drop of the ds_config),
// tokens of a block (random_ltd) and blocks of its attention (sparse_attention). Filled when the engine is there; null
// and empty: nothing.
#pragma once

#include <dsengine/efficiency.h>
#include <dsengine/sparse_attention.h>

#include <functional>
#include <memory>

namespace gpt {

struct Drops {
  std::shared_ptr<ds::efficiency::ProgressiveLayerDrop> layers = nullptr;
  std::shared_ptr<ds::efficiency::RandomLtd> tokens = nullptr;
  std::shared_ptr<const ds::ops::SparseSelfAttention> attention = nullptr;
};

// Block `index` of `count` on x [batch, time, hidden]. Causal attention needs the order of tokens alone, so that a
// block may see some of them.
at::Tensor run_block(const Drops& drops, int64_t index, int64_t count, const at::Tensor& x,
                     const std::function<at::Tensor(const at::Tensor&)>& block);

}  // namespace gpt
