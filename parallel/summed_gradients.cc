#include "parallel/summed_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <utility>

#include "core/check.h"
#include "parallel/axis/collectives.h"
#include "parallel/rules/dtypes.h"

namespace ds::parallel {

void SummedGradients::note_gradient(State& state, size_t leaf) {
  Watched& watched = state.leaves[leaf];
  state.pending = true;
  if (!watched.whole) return;
  // After a sum the next gradient begins a new one: added to what every rank has already it would count once too often.
  const at::Tensor& before = watched.leaf.grad();
  require(!before.defined() || before.count_nonzero().item<int64_t>() == 0, "parameter ", watched.name,
          " gets a gradient after its gradients were added up over the ranks (reduce_summed_gradients() or "
          "clip_grad_norm_()); accumulate first, add up once, and drop the gradients (zero_grad()) before the next "
          "backward pass");
  watched.whole = false;
}

void SummedGradients::watch(std::string name, const at::Tensor& leaf) {
  const size_t index = state_->leaves.size();
  state_->leaves.push_back({.name = std::move(name), .leaf = leaf});
  if (!leaf.is_floating_point()) return;
  // A frozen leaf takes no hook.
  const bool trained = leaf.requires_grad();
  leaf.set_requires_grad(true);
  leaf.register_hook([state = std::weak_ptr<State>(state_), index](const at::Tensor& gradient) {
    if (const auto living = state.lock()) note_gradient(*living, index);
    return gradient;
  });
  leaf.set_requires_grad(trained);
}

void SummedGradients::reduce() {
  if (!state_->pending) return;
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<Watched*>> alike;
  for (Watched& watched : state_->leaves) {
    const at::Tensor& leaf = watched.leaf;
    if (!leaf.requires_grad() && !leaf.grad().defined()) continue;
    alike[{leaf.device().str(), wide_type(leaf.scalar_type())}].push_back(&watched);
  }
  for (const auto& [kind, leaves] : alike) reduce_leaves(leaves);
  state_->pending = false;
}

void SummedGradients::reduce_leaves(const std::vector<Watched*>& leaves) {
  const at::ScalarType wide = wide_type(leaves[0]->leaf.scalar_type());
  const at::TensorOptions options = leaves[0]->leaf.options().dtype(wide);
  std::vector<at::Tensor> addends;
  // Whether a rank has one: a leaf that got a gradient on some ranks alone has one on all of them afterwards.
  const at::Tensor present = at::zeros({static_cast<int64_t>(leaves.size())}, options.device(at::kCPU));
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& gradient = leaves[i]->leaf.grad();
    if (gradient.defined()) present[static_cast<int64_t>(i)] = 1;
    // Added up before, and nothing since: every rank has all of it, so that it counts once.
    const bool counted = leaves[i]->whole && axis_->rank() != 0;
    const at::Tensor dense = counted || !gradient.defined() ? at::zeros_like(leaves[i]->leaf)
                             : gradient.is_sparse()         ? gradient.to_dense()
                                                            : gradient;
    addends.push_back(dense.to(wide).contiguous().view({-1}));
  }
  addends.push_back(present.to(options.device()));
  const at::Tensor sums = all_reduce_sum(at::cat(addends), *axis_);
  const at::Tensor present_somewhere = sums.narrow(0, sums.numel() - present.numel(), present.numel()).to(at::kCPU);
  int64_t begin = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& leaf = leaves[i]->leaf;
    const at::Tensor sum = sums.narrow(0, begin, leaf.numel()).view(leaf.sizes());
    begin += leaf.numel();
    if (present_somewhere[static_cast<int64_t>(i)].item<double>() == 0) continue;
    if (leaf.grad().defined() && !leaf.grad().is_sparse()) {
      leaf.mutable_grad().copy_(sum);
    } else {
      leaf.mutable_grad() = sum.to(leaf.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    leaves[i]->whole = true;
  }
}

}  // namespace ds::parallel
