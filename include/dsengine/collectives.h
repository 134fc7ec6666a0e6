// Collectives with a gradient, for losses and layers that use what other ranks have computed: contrastive losses,
// experts of the program's own, statistics of the global batch.
//
//   const at::Tensor keys = ds::parallel::all_gather(own_keys, engine->communicator());
//   engine->backward(contrastive_loss(own_queries, keys));
//
// The backward pass is that of torch.distributed.nn.functional: each rank gets the gradient of the sum of all ranks'
// losses with respect to its own input. An engine then takes the mean over the ranks, so that the update follows the
// mean of the ranks' losses. Nothing is left to scale: a rank computes the loss of its own rows, or every rank computes
// the loss of the whole batch (docs/patterns.md). The result has no gradient where the input requires none or gradients
// are off. Gradients of gradients are right, too.
//
// Every rank of `group` makes the same calls in the same order, with a graph that runs the same backward: a rank that
// leaves its result out of its loss multiplies it by 0. `group` outlives the graph. It is engine->communicator()
// where every trained parameter gets a gradient on every rank (the engine reduces over it in the same pass), a group of
// a mesh, or one that Communicator::new_group() has made; on the CPU and with NCCL on a GPU. Shapes and dtypes are the
// same on all ranks, but for the rows of all_to_all(). Over shared memory, and where ranks are watched
// (docs/failures.md), ranks that differ get a CommError that names both operations; rows of all_to_all() that do not
// fit one another are told over shared memory alone. A tensor that is split over a tensor axis is taken as a full one.
// UsageError for an undefined tensor, or one without a dimension to cut or join.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "dsengine/comm.h"

namespace ds::parallel {

// Returns the tensors of all ranks behind one another along `dim`, in rank order. Backward: reduce_scatter() with kSum.
at::Tensor all_gather(const at::Tensor& tensor, comm::Communicator& group, int64_t dim = 0);

// Returns the sum (kSum) or the mean (kAvg) of the tensors of all ranks; UsageError for another `op`. Backward: the sum
// or the mean of the gradients of all ranks.
at::Tensor all_reduce(const at::Tensor& tensor, comm::Communicator& group, comm::ReduceOp op = comm::ReduceOp::kSum);

// Returns this rank's part, one of size() equal ones along `dim`, of the sum or the mean of the tensors of all ranks.
// UsageError where the dimension does not divide, and for another `op`. Backward: all_gather(); for the mean, over
// size().
at::Tensor reduce_scatter(const at::Tensor& tensor, comm::Communicator& group, int64_t dim = 0,
                          comm::ReduceOp op = comm::ReduceOp::kSum);

// Sends part j of the rows (dimension 0) to rank j and returns what all ranks have sent here, in rank order. Parts are
// equal, or have `input_splits` rows; `output_splits` are the rows that come from each rank. They may be 0. Both are
// given, or none; UsageError for splits that are not one for each rank or do not add up to the rows. Backward: the
// gradients go back the same way.
at::Tensor all_to_all(const at::Tensor& tensor, comm::Communicator& group,
                      const std::vector<int64_t>& output_splits = {}, const std::vector<int64_t>& input_splits = {});

}  // namespace ds::parallel
