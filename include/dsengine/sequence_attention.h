// Attention over a sequence whose positions are cut over the ranks of a group (context parallelism): each rank has the
// queries, keys and values of its own positions, and gets its own positions of what one process would compute.
//
//   const at::Tensor own = ds::parallel::shard_sequence(tokens, group);           // [batch, own positions]
//   ...                                                                           // embeddings, projections: as ever
//   at::Tensor y = ds::parallel::ulysses_attention(q, k, v, group, {.causal = true});
//   engine->backward_mean(sum_of_own_losses, own_valid_tokens);                   // exact over all ranks
//
// Two ways, which give the same values:
// * ulysses_attention (DeepSpeed-Ulysses, arXiv:2309.14509): all-to-all from positions to heads, attention over the
//   whole sequence for some of the heads, all-to-all back. Takes dropout; needs a head of queries for each rank.
// * ring_attention (arXiv:2310.01889): keys and values travel around the ranks, one hop at a time, while each rank adds
//   what its queries see of them; sums over hops are float32. Any number of heads; no dropout. With causal attention
//   SequenceOrder::kZigzag gives each rank the same work.
//
// Sizes are those of at::scaled_dot_product_attention, [batch, heads, own positions, channels]; keys and values may
// have fewer heads than queries (grouped-query attention). q, k and v have one dtype, float32, float64, bfloat16 or
// float16, and equal channels. On the CPU LibTorch's flash kernels compute blocks of positions; on other devices
// ring_attention, and ulysses_attention with documents or a window, compose them of matrix products.
//
// All ranks of `group` call these functions in the same order with the same options, and their graphs run the same
// backward pass (dsengine/collectives.h); the group outlives the graph. No gradient of a gradient: with create_graph
// the backward pass of ring_attention is a UsageError. A tensor that is split over a tensor axis is refused.
//
// An unmodified module needs none of these calls. Given batches that are split tensors (dsengine/parallel.h), it
// computes on the positions of each rank, and scaled_dot_product_attention is one of the above:
//
//   auto axis = ds::parallel::make_sequence_axis(group);
//   auto split = ds::parallel::parallelize_sequence(*model, axis);
//   torch::optim::AdamW optimizer(split.leaves(), 1e-3);
//   model->forward(ds::parallel::cut_sequence(tokens, axis), ds::parallel::cut_sequence(labels, axis)).backward();
//   split.reduce_summed_gradients();
//   optimizer.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/parallel.h"

namespace ds::parallel {

// Which positions a rank of W has. kContiguous: the r-th of W pieces. kZigzag: the sequence is 2W equal pieces, and
// rank r has pieces r and 2W-1-r, so that early and late positions add up to the same causal work on every rank.
enum class SequenceOrder : uint8_t { kContiguous, kZigzag };

// How the positions of a sequence lie on the ranks of a group.
struct SequenceLayout {
  SequenceOrder order = SequenceOrder::kContiguous;
  std::vector<int64_t> lengths = {};  // positions of each rank, 1 or more, for kContiguous; empty: equally many
};

struct SequenceAttentionOptions {
  bool causal = false;        // a query sees its own position and earlier ones
  int64_t window = 0;         // above 0: it sees positions less than `window` away; 0: all
  at::Tensor documents = {};  // int64 on the CPU, [positions of the whole sequence] or [batch, positions], the same
                              // on all ranks: a query sees positions of its own document. Undefined: one document
  std::optional<double> scale = {};  // of the scores; nothing: 1 / sqrt(channels)
  double dropout = 0.0;              // of the weights; ulysses_attention alone, without documents and window
  SequenceLayout layout = {};
};

// Both return [batch, heads of q, own positions, channels]. A query that sees no position gets zeros. UsageError for
// sizes, dtypes, layouts and options that do not fit, and for a dropout where it cannot be.
at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                             const SequenceAttentionOptions& options = {});
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, comm::Communicator& group,
                          const SequenceAttentionOptions& options = {});

// Returns the numbers of this rank's positions, int64 [own positions] on the CPU, in the order in which it has them:
// for rotary and learned position embeddings. UsageError where `positions` do not divide into equal pieces, with the
// next length that does, or are not the sum of layout.lengths.
at::Tensor sequence_positions(int64_t positions, const comm::Communicator& group, const SequenceLayout& layout = {});

// Returns this rank's positions of a tensor that all ranks have, along `dim`, as a copy with a gradient. Shift labels
// before they are cut: the label of a piece's last position is in another piece.
at::Tensor shard_sequence(const at::Tensor& whole, const comm::Communicator& group, int64_t dim = 1,
                          const SequenceLayout& layout = {});

// Returns the whole of what each rank has, in the order of positions. Backward as that of all_gather(): each rank gets
// its positions of the sum of all ranks' gradients.
at::Tensor join_sequence(const at::Tensor& part, comm::Communicator& group, int64_t dim = 1,
                         const SequenceLayout& layout = {});

// How scaled_dot_product_attention is computed on split tensors whose positions are cut. kAuto: as ulysses_attention
// where the ranks divide the heads of queries and of keys, or where weights are dropped, else as ring_attention.
// kUlysses: UsageError where there are fewer heads of queries than ranks. kRing: UsageError with a dropout. With a
// mask, and where keys are not of the positions of the queries, keys and values are gathered instead, whatever the
// method.
enum class SequenceMethod : uint8_t { kAuto, kUlysses, kRing };

struct SequenceAxisOptions {
  SequenceMethod attention = SequenceMethod::kAuto;
  SequenceOrder order = SequenceOrder::kContiguous;
};

// Returns the axis of the ranks of `communicator`, which share each batch.
std::shared_ptr<Axis> make_sequence_axis(std::shared_ptr<comm::Communicator> communicator,
                                         const SequenceAxisOptions& options = {});

// Returns a tensor that all ranks have as a split tensor of the same sizes, of which each rank has the positions that
// the axis' order gives it along `dim` (from behind when negative); uneven lengths too. What the module makes of sizes,
// as torch::arange(tokens.size(1)), is of the whole sequence and meets each rank's positions by itself. Tensors without
// a sequence stay plain, and are the same on all ranks. With one rank the tensor itself. UsageError for an axis of
// another kind, fewer positions than ranks, or a tensor that is split already.
at::Tensor cut_sequence(const at::Tensor& whole, const std::shared_ptr<Axis>& axis, int64_t dim = 1);

// Makes the module's parameters, with rank 0's values, summed ones: no rank has less of them, and after backward each
// leaf's gradient is a partial sum, which reduce_summed_gradients() adds up over the axis. Every rank calls it. A loss
// that the module returns is a plain tensor, the same on all ranks: a mean counts the valid positions of all of them.
// Other results are split tensors, of which whole() is the full one. Throws as parallelize_module().
SplitModule parallelize_sequence(torch::nn::Module& module, const std::shared_ptr<Axis>& axis);

}  // namespace ds::parallel
