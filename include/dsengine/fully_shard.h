// FSDP2's fully_shard for LibTorch: parameters, gradients and optimizer states in parts on the ranks, in a loop as
// people write it:
//
//   for (auto& layer : *model->layers) ds::fully_shard(layer.ptr());
//   auto sharded = ds::fully_shard(model, {.mp_policy = {.param_dtype = torch::kBFloat16}});
//   torch::optim::AdamW optimizer(sharded->parameters(), torch::optim::AdamWOptions(3e-4));
//   for (auto& batch : *loader) {
//     auto loss = model->loss(batch.data, batch.target);
//     loss.backward();
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// The module stays what it is: its parameters are whole while operators read them (docs/fully_shard.md). What is
// trained are this rank's slices. One thread uses a FullySharded, which made it; all ranks do the same in one order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/device_mesh.h"
#include "dsengine/memory.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace ds {
namespace loops {
class ShardUnit;
}
namespace zero {
class Init;
}

// Dtypes; what is empty stays as it is. The optimizer's slices are float32 (float64 in a float64 model) in any case.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype;   // of parameters in forward and backward, and what is gathered
  std::optional<at::ScalarType> reduce_dtype;  // of gradients while they are reduced; empty: param_dtype
  // Of what FullySharded::forward() returns, and whether it casts floating-point inputs to param_dtype. A forward() of
  // the module itself, which LibTorch gives no hooks, gets inputs of param_dtype and returns what it returns.
  std::optional<at::ScalarType> output_dtype;
  bool cast_forward_inputs = true;
};

// Slices, their gradients and so the optimizer's states are in host memory; what is gathered goes to the device.
struct CPUOffloadPolicy {
  bool pin_memory = true;  // where the device is no CPU
};

// FSDP1's names.
enum class ShardingStrategy {
  kFullShard,    // FULL_SHARD: reshard_after_forward true
  kShardGradOp,  // SHARD_GRAD_OP: false
  kNoShard,      // NO_SHARD: every rank has all, gradients are all-reduced
  kHybridShard,  // HYBRID_SHARD: sharded along the last axis of a mesh with two; without one inside of each host
};

// BACKWARD_PRE: a unit's parameters are gathered while the unit before it computes gradients; BACKWARD_POST: after it.
enum class BackwardPrefetch { kBackwardPre, kBackwardPost };

// Of the outermost module all of it counts; of units inside it reshard_after_forward alone, and the rest has to be that
// of the outermost one, or left out.
struct FullyShardOptions {
  // The ranks: one axis shards; of two the last one shards and the first one has copies (gradients are averaged over
  // both). Else `process_group`; else the job's (engine::init_distributed). Of a split module other axes of its mesh.
  std::optional<comm::NamedMesh> mesh;
  std::shared_ptr<comm::Communicator> process_group;
  // Whether parameters are given back after forward and gathered again for backward (ZeRO-3); else they stay until the
  // end of backward. Empty: true, but for what lies in no unit of a module that has units, as in FSDP2.
  std::optional<bool> reshard_after_forward;
  MixedPrecisionPolicy mp_policy;
  std::optional<CPUOffloadPolicy> offload_policy;
  std::optional<ShardingStrategy> sharding_strategy;  // in place of reshard_after_forward
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kBackwardPre;
  bool limit_all_gathers = true;  // at most one unit is on its way ahead of use; else up to 50 Mi elements
  // "cpu", "cuda" or "cuda:N", where the module is moved; empty: where its parameters are. Of a module on the meta
  // device, where its slices are made: NaN, which backward() refuses, until `weights`, a load or the program sets them.
  std::string device;
  // A file with the first values, as InitializeOptions::weights; empty: rank 0's module has them.
  std::string weights;
  zero::Init* init = nullptr;  // which has sliced parameters while the whole model was built; ends with the first call
};

// A part of a parameter: elements [offset, offset + values.numel()) of the flattened whole.
struct ShardedTensor {
  std::string name;
  std::vector<int64_t> sizes;  // of the whole
  int64_t offset = 0;
  at::Tensor values;  // flat
};

// Which ranks get a full state dict.
struct FullStateOptions {
  bool rank0_only = false;  // others get an empty one, and hold one unit at a time meanwhile
};

using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

// A module whose parameters are sharded, or a unit of it. What it says of "the model" is of the outermost one. The
// model is sharded for as long as this object of the outermost module lives; then its parameters cannot be read.
class FullySharded {
 public:
  explicit FullySharded(std::shared_ptr<loops::ShardUnit> unit);
  ~FullySharded();
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  // This rank's slices, leaf tensors for an optimizer: one for each trained parameter, in the module's order, flat, of
  // the elements that this rank has of it, perhaps none. Their .grad is there when backward() returns: the mean over
  // the ranks, added to what it was. The same numbers of parameters and names on every rank.
  //
  // Optimizers must be elementwise (SGD, Adam(W), RMSprop, Adagrad are): what looks at whole parameters or norms of
  // them (LBFGS, LAMB) sees slices, and cannot be told from here.
  std::vector<at::Tensor> parameters() const;
  StateDict named_parameters() const;

  // model->forward(inputs...) with the casts of the policy.
  template <class Model, class... Inputs>
  auto forward(Model& model, Inputs&&... inputs) const {
    return cast_output(model->forward(cast_input(std::forward<Inputs>(inputs))...));
  }

  // Makes parameters whole until reshard(), the end of the next backward pass or the next step of an optimizer, to read
  // them or because they are used soon; gives them back. Collective.
  void unshard();
  void reshard();
  // Of the model: false: backward passes add to this rank's own whole gradients, and send nothing; the next pass with
  // true reduces them too.
  void set_requires_gradient_sync(bool requires_gradient_sync);
  // False: parameters stay whole after backward, for further passes before a step; the step gives them back.
  void set_reshard_after_backward(bool reshard_after_backward);
  void set_reshard_after_forward(bool reshard_after_forward);
  // Units that are gathered when this one is used in forward, or backward, in place of what followed last time.
  void set_modules_to_forward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units);
  void set_modules_to_backward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units);

  // Scales the gradients of the model's slices so that their norm over all ranks is at most `max_norm`; returns what it
  // was. `norm_type` may be infinity. Collective.
  // NOLINTNEXTLINE(readability-identifier-naming): torch's name
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);

  // --- state of the model: values of trained parameters are the float32 ones -----------------------------------------
  // Whole parameters and buffers by name, on the host. Collective.
  StateDict full_state_dict(const FullStateOptions& options = {}) const;
  // Parameters and buffers by name, all of them. `broadcast_from_rank0`: only rank 0's are read. Collective then.
  // Throws UsageError for a name that is missing, not known, or of another shape, before anything is changed.
  void load_full_state_dict(const StateDict& state, bool broadcast_from_rank0 = false);
  // This rank's parts, on the host; and from parts of any number of ranks, which have to cover what this rank has.
  std::vector<ShardedTensor> sharded_state_dict() const;
  void load_sharded_state_dict(const std::vector<ShardedTensor>& parts);
  // This rank's slices by name, as parameters() has them; for the same number of ranks and the same units.
  StateDict local_state_dict() const;
  void load_local_state_dict(const StateDict& state);
  // All ranks' parts as a checkpoint of the engine's in `folder`/`tag`, whose path it returns; and from one of any
  // number of ranks (an empty tag: the latest). Throw as Engine::save_checkpoint and load_checkpoint. Collective.
  std::string save(const std::string& folder, const std::string& tag) const;
  void load(const std::string& folder, const std::string& tag = "");

  // --- of an elementwise optimizer over parameters(): "state.PARAMETER.KEY" and "state.PARAMETER.step", as torch's
  // flattened states. save() and load() have the options of its groups, and random generators, too. As above else.
  StateDict full_optim_state_dict(torch::optim::Optimizer& optimizer, const FullStateOptions& options = {}) const;
  void load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state,
                                  bool broadcast_from_rank0 = false);
  std::vector<ShardedTensor> sharded_optim_state_dict(torch::optim::Optimizer& optimizer) const;
  void load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer, const std::vector<ShardedTensor>& parts);
  std::string save(const std::string& folder, const std::string& tag, torch::optim::Optimizer& optimizer) const;
  void load(const std::string& folder, const std::string& tag, torch::optim::Optimizer& optimizer);

  // Bytes that this rank holds now: parameters (slices, and what is whole in `gathered`), and gradients of slices.
  zero::HeldBytes held_bytes() const;

 private:
  template <class Input>
  decltype(auto) cast_input(Input&& input) const {
    if constexpr (std::is_convertible_v<Input, at::Tensor>) {
      return input_of_policy(input);
    } else {
      return std::forward<Input>(input);
    }
  }
  template <class Output>
  Output cast_output(Output output) const {
    if constexpr (std::is_same_v<Output, at::Tensor>) {
      return output_of_policy(output);
    } else {
      require_no_output_dtype();
      return output;
    }
  }
  void prefetch(const std::vector<std::shared_ptr<FullySharded>>& units, bool in_backward, const char* call);
  at::Tensor input_of_policy(const at::Tensor& input) const;
  at::Tensor output_of_policy(const at::Tensor& output) const;
  void require_no_output_dtype() const;

  std::shared_ptr<loops::ShardUnit> unit_;
};

// Shards the parameters of a module over the ranks, with rank 0's values. Called for modules inside of it before, on
// the same thread, it makes each of these a unit, which is gathered as one; the rest is cut into units by itself.
// Collective.
//
// Optimizers are made afterwards, over FullySharded::parameters(); one that was made before throws what to do.
// Values are loaded before, or by FullySharded's functions: backward() throws UsageError, naming it, for a parameter
// that has got other memory or another dtype since, and for a frozen one that requires a gradient.
// Throws UsageError for a module that is sharded already, is inside of one that is, or belongs to an engine or another
// wrapper; ConfigError for options that exclude each other, and for a mesh that does not fit a split module. A unit's
// result need not be kept. Its slices are taken over bucket by bucket, and have gone where the call around it throws.
std::shared_ptr<FullySharded> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                          const FullyShardOptions& options = {});
template <class Contained>
std::shared_ptr<FullySharded> fully_shard(const torch::nn::ModuleHolder<Contained>& module,
                                          const FullyShardOptions& options = {}) {
  return fully_shard(std::static_pointer_cast<torch::nn::Module>(module.ptr()), options);
}

}  // namespace ds
