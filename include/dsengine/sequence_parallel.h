// Long sequences under an engine: the config's sequence_parallel_size ranks share a batch, each with a piece of its
// sequences. For a model of the program's own, which computes on pieces; docs/long_sequences.md has whole programs.
//
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .cuts_sequences = true});
//   engine::SequenceParallel sequence(engine);
//   const at::Tensor labels = sequence.shard_labels(tokens);               // shifted, then cut
//   const at::Tensor logits = model->forward(sequence.shard(tokens), sequence.positions(tokens.size(1)),
//                                            [&](auto& q, auto& k, auto& v) { return sequence.attention(q, k, v); });
//   engine->backward_mean(sum_of_losses(logits, labels), own_valid_labels);  // exact over all ranks
//   engine->step();
//
// The program is the same for every sequence_parallel_size, 1 included. Ranks that share a batch have one
// engine->communicator().rank(), so a program that reads by it, and the engine's loader, give them the same samples.
// Gradients are added over these ranks and averaged over batches: what a rank gives to engine->backward(loss) is its
// addend of the loss, not a mean of its own. backward_mean(sum, count) counts over all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "dsengine/comm.h"
#include "dsengine/engine.h"
#include "dsengine/sequence_attention.h"

namespace ds::engine {

// How sequences lie on the ranks that share a batch, as the sections of the config say. A light object: copies refer to
// one engine, which they keep alive. Used by the engine's thread.
class SequenceParallel {
 public:
  // Collective over engine->world(): the first one makes the group. UsageError for an engine whose config has a
  // sequence_parallel_size above 1 and that was not made with .cuts_sequences.
  explicit SequenceParallel(std::shared_ptr<Engine> engine);

  // The ranks that share a batch; this rank alone without sequence_parallel_size.
  comm::Communicator& ranks() const { return *ranks_; }
  int size() const { return ranks_->size(); }
  // The order in which positions lie on ranks: sequence_parallel.order.
  const parallel::SequenceLayout& layout() const { return layout_; }
  // The dimension of a batch that has the positions: sequence_parallel.dimension.
  int64_t dimension() const { return dimension_; }

  // Returns this rank's positions of a tensor that all of ranks() have, along dimension(), as a copy. step() throws
  // UsageError on ranks that were given other tensors than the ranks they share a batch with (integers are compared by
  // value, others by shape). UsageError for a length that does not divide, with the next one that does.
  at::Tensor shard(const at::Tensor& whole) const;
  // Returns this rank's labels of a batch of tokens: at each position the token that follows, `ignored` at the last.
  at::Tensor shard_labels(const at::Tensor& tokens, int64_t ignored = -100) const;
  // Returns the numbers of this rank's positions of a sequence of `length`, int64 on the engine's device.
  at::Tensor positions(int64_t length) const;
  // Returns the whole of what each rank has along dimension(), on all of them. Collective over ranks().
  at::Tensor join(const at::Tensor& part) const;

  // Computes attention over the whole sequence for [batch, heads, own positions, channels], as scaled_dot_product_
  // attention does for one rank: by sequence_parallel.attention; "auto" is ulysses_attention where the ranks divide the
  // heads of q and of k, else ring_attention. `options.layout` is that of the config, whatever is given. Collective
  // over ranks(), backward too.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       parallel::SequenceAttentionOptions options = {.causal = true}) const;

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<comm::Communicator> ranks_;
  parallel::SequenceLayout layout_;
  int64_t dimension_ = 1;
};

}  // namespace ds::engine
