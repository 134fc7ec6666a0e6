// Activation checkpointing: a part of forward keeps its inputs only, and is computed again in backward.
//
//   x = recompute::checkpoint([block](const at::Tensor& x) { return block->forward(x); }, x);
//
// Follows "Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016) and behaves like
// torch.utils.checkpoint(use_reentrant=False). Gradients are those without it, bit for bit where the operators are
// deterministic. Parameters and other tensors that the function captures get their gradients as usual. Each hook of a
// tensor runs once, in the outer backward pass, and torch::autograd::grad() works.
//
// The region: the function is called now, without building a graph, and once more in every backward pass through its
// outputs, on the thread that runs it. Both runs must compute the same. So the function captures by value (or what
// lives until backward), does not change its inputs or captured tensors in place, and takes random numbers from the
// default generators only, whose states are restored. Autocast is restored too. Regions may be nested. BatchNorm counts
// a batch twice, but for layers of convert_sync_batchnorm.
//
// Differs from torch: every floating-point output requires a gradient as soon as one tensor that the function read
// does. create_graph (double backward) is refused. An output that shares memory with an input, another output or a
// captured tensor must not be changed in place (autograd says so); other outputs may.
//
// Threads: settings, statistics and regions belong to a thread. While a region is computed again, the tensors that it
// captures are cut from their own graph, so no other thread may use them then; two devices' regions of one backward
// pass must not share captured tensors.
//
// Throws UsageError when the recomputation differs from the first run: number, shape or dtype of outputs, a tensor that
// requires a gradient and was not read before, an input or captured tensor changed in place since. A second backward
// without retain_graph is LibTorch's error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsengine/comm.h"

namespace ds::recompute {

namespace internal {

// Visits the tensors inside a value: a tensor, a vector, optional, pair or tuple of such values, nested in any way.
// A value of any other type has no tensors.

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::bool_constant<!std::is_same_v<T, bool>> {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

// Calls visit(at::Tensor&) for each tensor, in order, also for undefined ones.
template <class T, class Visit>
void visit_tensors(T& value, Visit&& visit) {
  if constexpr (std::is_base_of_v<at::Tensor, T>) {
    visit(static_cast<at::Tensor&>(value));
  } else if constexpr (IsVector<T>::value) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (IsOptional<T>::value) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (IsTuple<T>::value) {
    std::apply([&](auto&... parts) { (visit_tensors(parts, visit), ...); }, value);
  }
}

// Moves the tensors out: undefined ones stay in their places.
template <class T>
std::vector<at::Tensor> take_tensors(T& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
  return tensors;
}

// The reverse, for a value of the same structure.
template <class T>
void put_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  visit_tensors(value, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

}  // namespace internal

// The section activation_checkpointing of a ds_config, and what the program adds.
struct CheckpointOptions {
  // Floating-point inputs that live on an accelerator are kept on the host, in pinned memory, and copied back.
  bool cpu_checkpointing = false;
  // Over T > 1 ranks on which the inputs are equal: each rank keeps 1/T of every floating-point input, padded, and
  // all-gathers them for the recomputation. Inputs of less than T elements stay whole, split tensors, of which a rank
  // has a part, as they are. The ranks: tensor_parallel_group, else the tensor axis of a living engine with the key
  // (docs/tensor_parallel.md), for regions that read a tensor split over it: an input, or one that is trained.
  bool partition_activations = false;
  // The copies that partition_activations and cpu_checkpointing make go to buffers of number_checkpoints slots each,
  // allocated at first use, one per position, size and dtype of an input. A slot is free again after its backward.
  bool contiguous_memory_optimization = false;
  std::optional<int64_t> number_checkpoints;  // regions between forward and backward at once; required with the former
  bool synchronize_checkpoint_boundary = false;  // wait for the devices where a region begins and ends
  bool profile = false;                          // count; see take_checkpoint_statistics()
  // The program's, for all regions: the ranks of partition_activations.
  std::shared_ptr<comm::Communicator> tensor_parallel_group = nullptr;
  bool preserve_rng_state = true;  // false: the recomputation draws other random numbers
};

// Set and return the options of checkpoint() on this thread. Throws UsageError for number_checkpoints below 1. Buffers
// of earlier settings are freed with their last region.
void configure_checkpointing(const CheckpointOptions& options);
const CheckpointOptions& checkpoint_options();

// Counts over the regions with `profile` that this thread began.
struct CheckpointStatistics {
  int64_t regions = 0;         // forwards
  int64_t recomputations = 0;  // in backward
  int64_t bytes_kept = 0;      // by this rank for inputs, summed over the regions
  double forward_seconds = 0;  // host time of the first runs; of devices only with synchronize_checkpoint_boundary
  double recomputation_seconds = 0;  // host time of the recomputations
};

// Returns the counts since the last call, and begins anew.
CheckpointStatistics take_checkpoint_statistics();

// Does what checkpoint() does, without templates: the function gets the tensors that were given, undefined ones too,
// and may return undefined ones.
using RegionFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> checkpoint_tensors(const CheckpointOptions& options, RegionFunction function,
                                           const std::vector<at::Tensor>& inputs);

// Calls fn(inputs...) as a region. Inputs and result: tensors, or vectors, optionals, pairs and tuples with tensors in
// them, nested in any way; anything else copyable is passed through. fn and inputs are copied.
template <class Fn, class... Inputs>
auto checkpoint_with(const CheckpointOptions& options, Fn&& fn, Inputs&&... inputs) {
  using Result = std::decay_t<std::invoke_result_t<std::decay_t<Fn>&, std::decay_t<Inputs>&...>>;
  std::tuple<std::decay_t<Inputs>...> arguments(std::forward<Inputs>(inputs)...);
  const std::vector<at::Tensor> tensors = internal::take_tensors(arguments);
  const auto result = std::make_shared<std::optional<Result>>();  // without its tensors
  const std::vector<at::Tensor> outputs = checkpoint_tensors(
      options,
      [fn = std::decay_t<Fn>(std::forward<Fn>(fn)), arguments = std::move(arguments),
       result](const std::vector<at::Tensor>& given) mutable {
        auto filled = arguments;
        internal::put_tensors(filled, given);
        Result returned = std::apply(fn, filled);
        std::vector<at::Tensor> taken = internal::take_tensors(returned);
        result->emplace(std::move(returned));
        return taken;
      },
      tensors);
  Result whole = std::move(**result);
  internal::put_tensors(whole, outputs);
  return whole;
}

// checkpoint_with() the options of this thread.
template <class Fn, class... Inputs>
auto checkpoint(Fn&& fn, Inputs&&... inputs) {
  return checkpoint_with(checkpoint_options(), std::forward<Fn>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace ds::recompute
