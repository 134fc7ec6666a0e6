// Collectives on parts of tensors: without history, the result in new memory. Every rank of the axis calls them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/split/split_tensor.h"
#include "dsengine/comm.h"

namespace ds::parallel {

// The whole, of `sizes`, from every rank's part.
at::Tensor all_gather_parts(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes);
// This rank's part of the sum of `whole` over the ranks.
at::Tensor reduce_scatter_parts(const at::Tensor& whole, const Placement& placement);
// From parts along one dimension to parts along another. `sizes`: of the whole; the dimensions differ.
at::Tensor all_to_all_parts(const at::Tensor& part, const Placement& from, const Cut& to, c10::IntArrayRef sizes);
// The rows of dimension 0 that each rank has sent to this one. `sent`, `received`: rows for and from each rank; empty:
// equally many.
at::Tensor all_to_all_rows(const at::Tensor& rows, SplitAxis& axis, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received);
at::Tensor all_reduce_sum(const at::Tensor& tensor, SplitAxis& axis);
at::Tensor all_reduce_max(const at::Tensor& tensor, SplitAxis& axis);

// A collective that is under way: the result is there, and the input may go, after work.wait().
struct BegunCollective {
  at::Tensor result;
  comm::Work work;
  at::Tensor input;
};
BegunCollective begin_all_reduce_sum(const at::Tensor& tensor, SplitAxis& axis);
// Uneven parts are there at once.
BegunCollective begin_reduce_scatter_parts(const at::Tensor& whole, const Placement& placement);

}  // namespace ds::parallel
