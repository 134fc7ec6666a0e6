// Modules that are split over ranks, beside the same module on one.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/split/split_tensor.h"
#include "dsengine/parallel.h"
#include "parallel/axis/axis.h"
#include "parallel/axis/conversions.h"
#include "tests/support/thread_ranks.h"

namespace ds::parallel {

// For make_axis; the communicator outlives it.
inline std::shared_ptr<comm::Communicator> shared(comm::Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

// Of a plain tensor, with its history.
inline at::Tensor split_as(const at::Tensor& tensor, const std::shared_ptr<Axis>& axis, const Cut& cut) {
  const Placement placement{.axis = axis, .cut = normalized(cut, tensor.size(cut.dim), axis->size())};
  return make_split(sliced(tensor, placement).clone(at::MemoryFormat::Contiguous), placement, tensor.sizes());
}

// The norm of the difference over the norm.
inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  if (!found.defined() || found.sizes() != expected.sizes()) return 1e9;
  if (expected.numel() == 0) return 0;
  const auto wide = [](const at::Tensor& tensor) { return tensor.detach().to(at::kDouble); };
  const double difference = (wide(found) - wide(expected)).norm().item<double>();
  return std::isnan(difference) ? 1e9 : difference / std::max(wide(expected).norm().item<double>(), 1e-6);
}

struct SplitCase {
  int ranks = 2;
  std::vector<SplitRule> rules;
  double tolerance = 1e-6;
  bool joins = false;  // operators may be joined
  bool verify = false;
  bool sequence_parallel = false;
  bool overlap = false;
};

// Makes one module a rank with equal values (a seed is set, one rank after another).
template <class Module>
std::shared_ptr<Module> made_alike(const std::function<std::shared_ptr<Module>()>& make) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return make();
}

// Loss and all gradients of the split module are those of the whole one.
template <class Module>
void expect_same_as_whole(const std::function<std::shared_ptr<Module>()>& make,
                          const std::function<at::Tensor(Module&)>& loss_of, const SplitCase& wanted) {
  const std::shared_ptr<Module> reference = made_alike(make);
  const at::Tensor expected = loss_of(*reference);
  expected.backward();
  const auto gradients = reference->named_parameters();
  test::run_ranks(wanted.ranks, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Module> module = made_alike(make);
    const SplitModule split = parallelize_module(
        *module, shared(communicator), wanted.rules,
        {.verify = wanted.verify, .sequence_parallel = wanted.sequence_parallel, .overlap = wanted.overlap});
    const at::Tensor loss = whole(loss_of(*module));
    EXPECT_LE(relative_error(loss, expected), wanted.tolerance) << "loss";
    loss.backward();
    split.reduce_summed_gradients();
    for (const auto& entry : module->named_parameters()) {
      at::Tensor truth = gradients[entry.key()].grad();
      const at::Tensor leaf = is_split(entry.value()) ? leaf_of(entry.value()) : entry.value();
      if (is_split(entry.value())) truth = slice_of(truth, placement_of(entry.value()));
      EXPECT_LE(relative_error(leaf.grad(), truth), wanted.tolerance)
          << "gradient of " << entry.key() << ", rank " << communicator.rank();
    }
    std::string joined;
    for (const JoinedOperator& op : split.joined_operators()) joined += op.name + " ";
    EXPECT_EQ(joined.empty(), !wanted.joins) << "joined: " << joined;
  });
}

}  // namespace ds::parallel
