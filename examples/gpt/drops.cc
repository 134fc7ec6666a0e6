#include "drops.h"

namespace gpt {

at::Tensor run_block(const Drops& drops, int64_t index, int64_t count, const at::Tensor& x,
                     const std::function<at::Tensor(const at::Tensor&)>& block) {
  const auto on_tokens = [&](const at::Tensor& all) {
    if (!drops.tokens) return block(all);
    return (*drops.tokens)(index, all,
                           [&](const at::Tensor& some, const at::Tensor& /*positions*/) { return block(some); });
  };
  return drops.layers ? (*drops.layers)(index, count, x, on_tokens) : on_tokens(x);
}

}  // namespace gpt
