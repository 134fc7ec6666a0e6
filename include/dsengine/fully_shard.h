// FSDP2's fully_shard for LibTorch: parameters, gradients and optimizer states are sharded over the ranks, in a
// training loop of the program's own:
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
// The module keeps its parameters, which are gathered while operators read them (docs/fully_shard.md). The optimizer
// trains this rank's slices. The thread that made a FullySharded uses it; all ranks make the same calls.
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

// Dtypes; empty: left as it is. The optimizer's slices are always float32 (float64 in a float64 model).
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype;   // parameters as they are gathered, and used in forward and backward
  std::optional<at::ScalarType> reduce_dtype;  // gradients while they are reduced; empty: param_dtype
  // The dtype of FullySharded::forward()'s result, and whether it casts floating-point inputs to param_dtype. forward()
  // of the module itself casts nothing (LibTorch has no hooks for it): give it inputs of param_dtype.
  std::optional<at::ScalarType> output_dtype;
  bool cast_forward_inputs = true;
};

// Keeps slices, their gradients and so optimizer states in host memory; gathered parameters are on the device.
struct CPUOffloadPolicy {
  bool pin_memory = true;  // pins that memory where the device is not the CPU
};

// Ways to shard, with FSDP1's names.
enum class ShardingStrategy {
  kFullShard,    // FULL_SHARD: reshard_after_forward true
  kShardGradOp,  // SHARD_GRAD_OP: reshard_after_forward false
  kNoShard,      // NO_SHARD: every rank has all, gradients are all-reduced
  kHybridShard,  // HYBRID_SHARD: sharded along the last of two mesh axes; without a mesh inside of each host
};

// Whether backward gathers a unit's parameters while the unit before it computes gradients (BACKWARD_PRE), or after it.
enum class BackwardPrefetch { kBackwardPre, kBackwardPost };

// Options of fully_shard(). For units inside of the outermost module only reshard_after_forward counts; the rest has to
// equal the outermost module's, or to be left out.
struct FullyShardOptions {
  // The ranks. One axis shards; with two axes the last one shards and the first one replicates (gradients are averaged
  // over both). A split module takes other axes of its own mesh. Without a mesh: `process_group`, else the whole job.
  std::optional<comm::NamedMesh> mesh;
  std::shared_ptr<comm::Communicator> process_group;
  // Whether parameters are released after forward and gathered again for backward (ZeRO-3); else they stay until the
  // end of backward. Empty: true, but false for what lies in no unit of a module that has units, as in FSDP2.
  std::optional<bool> reshard_after_forward;
  MixedPrecisionPolicy mp_policy;
  std::optional<CPUOffloadPolicy> offload_policy;
  std::optional<ShardingStrategy> sharding_strategy;  // give it in place of reshard_after_forward
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kBackwardPre;
  bool limit_all_gathers = true;  // gathers at most one unit ahead of its use; else up to 50 Mi elements
  // "cpu", "cuda" or "cuda:N": where the module is moved; empty: where its parameters are. A module on the meta device
  // gets slices of NaN there, which backward() refuses until `weights`, a load or the program has set them.
  std::string device;
  // A file with the first values, as InitializeOptions::weights; empty: the values of rank 0's module.
  std::string weights;
  zero::Init* init = nullptr;  // the scope in which the whole model was built; the first call ends it
};

// A shard of a parameter: elements [offset, offset + values.numel()) of the flattened full tensor.
struct ShardedTensor {
  std::string name;
  std::vector<int64_t> sizes;  // sizes of the full tensor
  int64_t offset = 0;
  at::Tensor values;  // flat
};

// Which ranks get a full state dict.
struct FullStateOptions {
  bool rank0_only = false;  // the others get an empty one, and hold one unit at a time meanwhile
};

// Tensors by name, in order.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

// A module whose parameters are sharded, or a unit of it. "The model" is the outermost module. It is sharded as long as
// its FullySharded lives; after that its parameters cannot be read.
class FullySharded {
 public:
  explicit FullySharded(std::shared_ptr<loops::ShardUnit> unit);
  ~FullySharded();
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  // This rank's slices, leaf tensors for an optimizer: one for each trained parameter, in the module's order, flat,
  // with the elements that this rank owns, perhaps none; as many on every rank. backward() adds the mean gradient over
  // the ranks to their .grad. Optimizers must be elementwise (SGD, Adam(W), RMSprop, Adagrad are): LBFGS or LAMB, which
  // look at full parameters, would see slices, and nothing here can detect it.
  std::vector<at::Tensor> parameters() const;
  StateDict named_parameters() const;

  // Calls model->forward(inputs...) with the casts of the policy.
  template <class Model, class... Inputs>
  auto forward(Model& model, Inputs&&... inputs) const {
    return cast_output(model->forward(cast_input(std::forward<Inputs>(inputs))...));
  }

  // unshard() gathers the parameters, to read them or to use them soon, until reshard(), the end of the next backward
  // pass or the next step of an optimizer; reshard() releases them. Collective.
  void unshard();
  void reshard();
  // Sets whether backward reduces gradients of the model. False: it adds to this rank's own full gradients and sends
  // nothing; the next pass with true reduces these too.
  void set_requires_gradient_sync(bool requires_gradient_sync);
  // Set whether parameters are released after backward (false: they stay until a step), and after forward.
  void set_reshard_after_backward(bool reshard_after_backward);
  void set_reshard_after_forward(bool reshard_after_forward);
  // Set the units to gather when this one is used in forward, or in backward; by default those that followed last time.
  void set_modules_to_forward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units);
  void set_modules_to_backward_prefetch(const std::vector<std::shared_ptr<FullySharded>>& units);

  // Scales the gradients of the model's slices so that their norm over all ranks is at most `max_norm`; returns the
  // norm before. `norm_type` may be infinity. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);  // NOLINT(readability-identifier-naming)

  // --- state of the model: values of trained parameters are the float32 ones -----------------------------------------
  // Returns full parameters and buffers by name, on the host. Collective.
  StateDict full_state_dict(const FullStateOptions& options = {}) const;
  // Sets all parameters and buffers by name. With `broadcast_from_rank0` only rank 0's are read, and it is collective.
  // Throws UsageError for a missing or unknown name and for another shape, before anything is changed.
  void load_full_state_dict(const StateDict& state, bool broadcast_from_rank0 = false);
  // Return this rank's shards, on the host, and set them from shards of any number of ranks.
  std::vector<ShardedTensor> sharded_state_dict() const;
  void load_sharded_state_dict(const std::vector<ShardedTensor>& parts);
  // Return and set this rank's slices by name, in the form of parameters(): for as many ranks and the same units.
  StateDict local_state_dict() const;
  void load_local_state_dict(const StateDict& state);
  // Write all ranks' shards as an engine's checkpoint to `folder`/`tag`, whose path save() returns, and load one of any
  // number of ranks (an empty tag: the latest). Errors are those of the engine's checkpoints. Collective.
  std::string save(const std::string& folder, const std::string& tag) const;
  void load(const std::string& folder, const std::string& tag = "");

  // --- state of an elementwise optimizer over parameters() ----------------------------------------------------------
  // The functions above, for optimizer states: "state.PARAMETER.KEY" and "state.PARAMETER.step", as torch flattens
  // them. save() and load() also keep group options and random generators.
  StateDict full_optim_state_dict(torch::optim::Optimizer& optimizer, const FullStateOptions& options = {}) const;
  void load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state,
                                  bool broadcast_from_rank0 = false);
  std::vector<ShardedTensor> sharded_optim_state_dict(torch::optim::Optimizer& optimizer) const;
  void load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer, const std::vector<ShardedTensor>& parts);
  std::string save(const std::string& folder, const std::string& tag, torch::optim::Optimizer& optimizer) const;
  void load(const std::string& folder, const std::string& tag, torch::optim::Optimizer& optimizer);

  // The bytes that this rank holds now: slices, gathered parameters (in `gathered`), and gradients of slices.
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

// Shards the parameters of a module over the ranks, with rank 0's values. Collective. Call it first, on the same
// thread, for modules inside: each becomes a unit, which is gathered as one; the rest is divided into units
// automatically. The call for the outermost module takes over the slices of units; if it throws, they are lost.
//
//
// Make optimizers afterwards, over FullySharded::parameters(); an optimizer that was made before throws what to do.
// Load values before, or by FullySharded's functions: backward() throws UsageError, naming the parameter, where a
// parameter has got other memory or another dtype since, or a frozen one requires a gradient.
//
// Throws UsageError for a module that is sharded, inside of a sharded one, or an engine's or another wrapper's, and for
// two trained parameters over one memory; ConfigError for options that exclude each other, or a mesh that does not fit.
std::shared_ptr<FullySharded> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                          const FullyShardOptions& options = {});
template <class Contained>
std::shared_ptr<FullySharded> fully_shard(const torch::nn::ModuleHolder<Contained>& module,
                                          const FullyShardOptions& options = {}) {
  return fully_shard(std::static_pointer_cast<torch::nn::Module>(module.ptr()), options);
}

}  // namespace ds
