// Data parallelism for loops as PyTorch's users write them: DistributedDataParallel around a module.
//
//   auto model = Net();
//   ds::DistributedDataParallel ddp(model, {.find_unused_parameters = true});
//   torch::optim::SGD optimizer(model->parameters(), 0.1);
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     loss_of(ddp(batch.data), batch.target).backward();  // or ddp.module->forward(batch.data)
//     optimizer.step();
//   }
//
// Every rank holds the whole model and gives it its own batches. Parameters and buffers start as rank 0's. backward()
// reduces bucket by bucket while it runs, and when it returns .grad of each parameter is the mean over the ranks: of
// all that .grad holds, of earlier passes too, as torch's. Any optimizer on model->parameters() then does the same on
// every rank. Differences from torch.nn.parallel.DistributedDataParallel: docs/loops.md.
//
// Threads: the wrapper, the model and its backward passes are used from one thread, the one that made it or another at
// a time. Collective: all ranks of the group make the same wrappers and run the same backward passes in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "dsengine/comm.h"

namespace torch::nn {
class Module;
}

namespace ds {

// Options of DistributedDataParallel, with torch's names and meanings.
struct DistributedDataParallelOptions {
  // The ranks that hold the model: a group, or an axis of a mesh (mesh["dp"]). Null: all ranks of the job
  // (engine::init_distributed). Wrappers of one loss may share it where all ranks run the same graph on one device;
  // else each needs one of its own (Communicator::new_group), for they reduce in the order in which gradients are made.
  std::shared_ptr<comm::Communicator> process_group;
  // Empty: wherever the module's parts are, on one device or several. One number: all of it must be on that CUDA
  // device.
  std::vector<int> device_ids;
  // Buckets of gradients hold up to so many MiB; a larger parameter has one of its own. > 0
  double bucket_cap_mb = 25;
  // The MiB of the bucket that is reduced first, which has the last parameters: small, so that it leaves early. > 0
  double first_bucket_mb = 1;
  // Buffers follow rank 0's: before each call of the wrapper, or, where the program calls the module itself, at the end
  // of each backward() that reduces.
  bool broadcast_buffers = true;
  // Parameters may get no gradient in a backward(), on some ranks or on all. Costs a small all-reduce in each. False:
  // such a pass makes the next one throw, naming them.
  bool find_unused_parameters = false;
  // Every pass gives gradients to the same parameters: found out in the first one, which reduces at its end. Allows
  // parameters without a gradient, and those that get several in a pass (reentrant activation checkpointing), where
  // reductions then wait for the end of each.
  bool static_graph = false;
  // .grad is a view of its bucket. False: memory of its own, as large again, and a copy in each pass.
  bool gradient_as_bucket_view = true;
};

// Options of DistributedDataParallel::join().
struct JoinOptions {
  // While some ranks have no more batches gradients are still divided by the size of the group; false: by the number of
  // ranks that have some.
  bool divide_by_initial_world_size = true;
  // Throw UsageError on every rank as soon as one rank has no more batches where others have, in place of going on.
  bool throw_on_early_termination = false;
};

// Choices of what is sent in place of the gradients: torch's communication hooks.
namespace comm_hooks {

struct AllReduce {};  // the gradients as they are
struct Float16 {};    // allreduce as float16, divided before it: half of the bytes
struct BFloat16 {};
// A quarter of the bytes: integers with a scale for each block (docs/gradient_compression.md). float32 and 16-bit
// gradients, as all below.
struct Int8 {
  bool use_error_feedback = true;  // the part that was not sent is added to the next gradient
};
// Factors of each matrix, Vogels et al., arXiv:1905.13727, with warm start.
struct PowerSgd {
  int64_t matrix_approximation_rank = 1;
  int64_t start_iter = 1000;  // backward passes that reduce as they are, before
  bool use_error_feedback = true;
};
// The elements of largest magnitude.
struct TopK {
  double share = 0.01;  // share of a bucket's elements, 0 < share <= 1
  bool use_error_feedback = true;
};

// One bucket of this rank's gradients, which an own hook is given.
struct GradBucket {
  size_t index = 0;                     // equal on all ranks
  bool is_last = false;                 // the last bucket of the pass
  at::Tensor buffer;                    // [elements], flat: may be changed, and returned
  std::vector<at::Tensor> gradients;    // views of it, in the shapes of the parameters
  std::vector<std::string> parameters;  // their names
  comm::Communicator& group;            // the ranks of the wrapper
};
// Begins the exchange, inside backward, and returns what waits for it: that returns the mean over the ranks, of the
// shape and dtype of the buffer, the same bits on every rank. Calls come in one order on all ranks, on a thread of
// autograd; so do those that wait.
using Own = std::function<std::function<at::Tensor()>(GradBucket&)>;

}  // namespace comm_hooks

using CommHook = std::variant<comm_hooks::AllReduce, comm_hooks::Float16, comm_hooks::BFloat16, comm_hooks::Int8,
                              comm_hooks::PowerSgd, comm_hooks::TopK, comm_hooks::Own>;

namespace loops {

// The work of DistributedDataParallel, for any type of module.
class ReplicatedModel {
 public:
  // Takes the arguments of DistributedDataParallel.
  ReplicatedModel(std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options);
  ~ReplicatedModel();
  ReplicatedModel(const ReplicatedModel&) = delete;
  ReplicatedModel& operator=(const ReplicatedModel&) = delete;

  // Called before each forward pass.
  void before_forward();
  // Begin and end a span in which backward() reduces nothing; spans may be nested.
  void begin_no_sync();
  void end_no_sync();
  // Do what the functions of DistributedDataParallel do.
  void join(const std::function<void()>& loop, const JoinOptions& options);
  void register_comm_hook(const CommHook& hook);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The scope of DistributedDataParallel::no_sync().
class NoSyncScope {
 public:
  explicit NoSyncScope(ReplicatedModel& model) : model_(model) { model_.begin_no_sync(); }
  ~NoSyncScope() { model_.end_no_sync(); }
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  ReplicatedModel& model_;
};

template <class Model>
std::shared_ptr<torch::nn::Module> pointer_to(const Model& model) {
  if constexpr (requires { model.ptr(); }) {
    return model.ptr();
  } else {
    return model;
  }
}

}  // namespace loops

// Model: a module's holder (Net), or a shared_ptr of a module. Shares the module; it must stay as it is, but for
// values: no parameters added or replaced, no other dtype or device. One wrapper or engine for a module at a time. It
// is neither copied nor moved. A class that makes it later has a member std::optional<DistributedDataParallel<Net>>,
// and calls ddp.emplace(net) or ddp.emplace(net, DistributedDataParallelOptions{...}).
template <class Model>
class DistributedDataParallel {
 public:
  // Parameters and buffers become rank 0's. Collective. Throws UsageError for a module without parameters that require
  // a gradient, a module that another wrapper or engine has, device_ids that it is not on, and sizes that are not
  // positive. Throws CommError, on all ranks, where names, shapes, dtypes or options are not the same on each, naming
  // what differs.
  explicit DistributedDataParallel(Model model, const DistributedDataParallelOptions& options = {})
      : module(std::move(model)), replica_(loops::pointer_to(module), options) {}

  // The module that was given: module->forward(x), torch::save(module, path).
  Model module;
  auto* operator->() { return &*module; }

  // The module's forward, with rank 0's buffers. Throws UsageError where the last pass left parameters without a
  // gradient and find_unused_parameters is false.
  template <class... Inputs>
  decltype(auto) forward(Inputs&&... inputs) {
    replica_.before_forward();
    return module->forward(std::forward<Inputs>(inputs)...);
  }
  template <class... Inputs>
  decltype(auto) operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  // While the scope lives, backward() keeps gradients to this rank; the first backward() after it reduces their sum.
  [[nodiscard]] loops::NoSyncScope no_sync() { return loops::NoSyncScope(replica_); }

  // Runs `loop`, whose batches may be fewer than other ranks': then this rank takes part in the others' reductions,
  // with zeros, until all have ended, and parameters and buffers become those of a rank that ended last. Every backward
  // in the loops must reduce (no_sync() inside an iteration is fine). Collective. Throws what the loop throws, and
  // UsageError as JoinOptions say, and for BatchNorm layers that compute over ranks (convert_sync_batchnorm).
  void join(const std::function<void()>& loop, const JoinOptions& options = {}) { replica_.join(loop, options); }

  // Sets what is sent from now on. Before the first backward(), once. Collective. Throws UsageError at another time,
  // for numbers out of range, and for gradients that the hook cannot take, naming the parameter.
  void register_comm_hook(const CommHook& hook) { replica_.register_comm_hook(hook); }

 private:
  loops::ReplicatedModel replica_;
};

}  // namespace ds
