// Tensor parallelism of any module: parameters of which each rank has a part.
//
//   using enum ds::parallel::Style;
//   auto split = ds::parallel::parallelize_module(*model, communicator, {{".*qkv", kColumn, {h, h, h}},
//       {".*attn.proj", kRow}, {".*fc", kColumn}, {".*mlp.proj", kRow}, {"wte|head", kVocabulary}});
//   torch::optim::AdamW optimizer(split.leaves(), 1e-3);
//   model->forward(tokens, targets).backward();      // as before; every rank gets the same batch
//   optimizer.step();
//
// A split parameter is an ordinary tensor that shows the whole's sizes; the module stays as it is. Operators on it work
// on parts where a rule is known (linear layers, attention, embedding, normalization, losses, what is element by
// element, reshapes, ...), and on the joined whole where none is: right in any case, and told once. Column and row
// parallel layers and the vocabulary-parallel loss are those of Megatron-LM (arXiv:1909.08053); that tensors carry
// their placement is the idea of torch's DTensor.
//
// Ranks of an axis run the same program on the same batches: what is not split is the same on all of them, so is its
// gradient, and every operator on a split tensor is collective. An axis and its tensors belong to one thread at a time.
// Generators of random numbers must be seeded alike on its ranks; dropout then draws the same everywhere, and on the
// CPU what one process draws.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/split_plan.h"

namespace torch::nn {
class Module;
}

namespace ds::parallel {

// This rank's end of an axis; opaque.
class Axis;
class SummedGradients;

// A module that knows how it is split: a base class beside torch::nn::Module (or Cloneable). parallelize_module asks
// every module that has it; patterns are relative to the module's own name, and "" is the module itself.
struct HasSplits {
  HasSplits() = default;
  HasSplits(const HasSplits&) = default;
  HasSplits& operator=(const HasSplits&) = default;
  virtual ~HasSplits() = default;
  virtual std::vector<SplitRule> splits() const = 0;
};
// Returns the rules that the modules declare, with full names: a module's rules before those of the modules in it.
std::vector<SplitRule> declared_splits(const torch::nn::Module& module);

struct ParallelizeOptions {
  // Every operator that a rule computes is computed on joined tensors too, and compared: forward, and the gradients
  // that arrive at its operands. An error names the operator. Slow; for a few steps of a new model.
  bool verify = false;
  // Megatron-LM's sequence parallelism (arXiv:2205.05198): where row layers and embeddings add up over the ranks, each
  // rank gets the sums of its part of the second last dimension (the tokens of [batch, tokens, hidden]) alone, if that
  // divides evenly. What follows (norms, dropout, residuals) works on that part, column layers gather it. As many bytes
  // are sent, and activations between layers take one T-th of the memory. Gradients of whole parameters are then parts
  // on each rank: SplitModule::reduce_summed_gradients.
  bool sequence_parallel = false;
  // DeepSpeed's tp_overlap_comm: the sum over the ranks of the gradient of a column layer's input (with
  // sequence_parallel the reduce-scatter) runs beside the product that gives its weight's gradient. The same bits.
  // Gains where the communicator works by itself (GPUs, a core to spare); not under autocast.
  bool overlap = false;
};

// An operator that had no rule and was computed on gathered (full) tensors.
struct JoinedOperator {
  std::string name;        // "aten::conv2d"
  int64_t calls = 0;       // calls whose tensors were gathered
  int64_t bytes = 0;       // bytes of the full tensors, together
  std::string parameters;  // split parameters among them, "a, b"
};

// A module that was split. Does not own it.
struct SplitModule {
  std::shared_ptr<Axis> axis;
  SplitPlan plan;
  // In module order, each tensor once: this rank's parts of split parameters (plain leaves, which alone have gradients
  // and are trained), and whole parameters as they are.
  std::vector<std::pair<std::string, at::Tensor>> named_leaves;

  // The gradients of unsplit parameters that are added up over the ranks with sequence_parallel; null without.
  std::shared_ptr<SummedGradients> summed_gradients = nullptr;

  std::vector<at::Tensor> leaves() const;
  // The leaves whose gradients are partial sums on each rank after backward, to be added up over the axis: unsplit
  // parameters with sequence_parallel, by the names of named_leaves.
  std::vector<std::pair<std::string, at::Tensor>> summed_leaves() const;
  // Adds up the gradients of summed_leaves() over the ranks: after the last backward pass, before the optimizer's step.
  // Nothing where none has arrived since the last time. Collective. A backward pass afterwards, before the gradients
  // are dropped, throws UsageError.
  void reduce_summed_gradients() const;
  // Drops the leaves' gradients. zero_grad() of the module does not reach parts: its own parameters are no leaves.
  void zero_grad() const;
  // Scales all gradients so that their norm (L2, of the whole model: parts added up over the axis, whole parameters
  // counted once) is at most max_norm, and returns the norm before, the same on all ranks. A norm that is not finite is
  // used as it is, as torch's. Calls reduce_summed_gradients() first. Collective. torch::nn::utils::clip_grad_norm_ on
  // leaves() would take another norm on each rank, and whole parameters would drift apart. Throws UsageError for a
  // max_norm that is not above 0.
  double clip_grad_norm_(double max_norm) const;  // NOLINT(readability-identifier-naming): torch's name
  // The operators that gathered tensors since the start, or since the reset.
  std::vector<JoinedOperator> joined_operators() const;
  void reset_joined_operators() const;
};

// Splits the module's parameters in place over the ranks of `communicator`; every rank calls it with the same module
// and rules, which go before those that its modules declare (HasSplits). Values are rank 0's. Parameters keep their
// identity (members, tied names) and lose their memory; gradients they had are dropped. What would give a split
// parameter other memory afterwards (module.to(), torch::load()) throws UsageError. Its .grad cannot be read: an
// optimizer made before, or clipping over the module's parameters, gets a c10::Error that names one; a backward pass
// after module.zero_grad() alone throws UsageError. Throws UsageError as plan_splits, and when a parameter is split
// already, has a history, or is tied to one that another rule splits otherwise.
SplitModule parallelize_module(torch::nn::Module& module, std::shared_ptr<comm::Communicator> communicator,
                               const std::vector<SplitRule>& rules, const ParallelizeOptions& options = {});

// Tensors of a program's own along an axis.
std::shared_ptr<Axis> make_axis(std::shared_ptr<comm::Communicator> communicator);
// The part of a tensor that all ranks have, as a split tensor of the same sizes, with its history; dimensions count
// from behind when negative. With one rank the tensor itself. Throws UsageError for dimensions and blocks that do not
// fit.
at::Tensor distribute(const at::Tensor& tensor, const std::shared_ptr<Axis>& axis, int64_t dim,
                      const std::vector<int64_t>& blocks = {});
// Splits a tensor along another dimension or in other blocks: an all-to-all. An unsplit tensor stays as it is.
at::Tensor redistribute(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& blocks = {});
// Returns the full tensor as a plain one: an all-gather. An unsplit tensor stays as it is.
at::Tensor whole(const at::Tensor& tensor);
// This rank's part, plain, with its history; of a whole parameter under sequence_parallel the leaf, whose gradient is
// to be added up. A tensor that is not split stays as it is. What a program computes of it differs by rank: a whole
// parameter used on it gets this rank's part of its gradient alone, which nobody adds up.
at::Tensor local_part(const at::Tensor& tensor);
bool is_split(const at::Tensor& tensor);

// Returns the logarithm of the softmax of scores [..., classes] at `targets` [...], integers; 0 where a target is
// ignore_index. Scores may be split along the classes (a vocabulary), and are not gathered: ranks exchange a few
// numbers of each row. Differentiable; float32 for 16-bit scores. Throws UsageError for other sizes or dtypes.
at::Tensor log_probabilities(const at::Tensor& scores, const at::Tensor& targets, int64_t ignore_index = -100);
// Returns the entropy of the softmax of such scores, in nats: [...]. A class with a score of minus infinity counts
// nothing.
at::Tensor entropy(const at::Tensor& scores);

}  // namespace ds::parallel
