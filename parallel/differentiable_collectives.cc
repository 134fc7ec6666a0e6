// The public collectives with a gradient: checks of the arguments around the conversions of axis/conversions.h.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/collectives.h"
#include "parallel/axis/axis.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {
namespace {

// The program owns the group, which outlives the graph.
std::shared_ptr<Axis> axis_over(comm::Communicator& group) {
  return std::make_shared<Axis>(std::shared_ptr<comm::Communicator>(std::shared_ptr<void>(), &group));
}

// Returns the full tensor. What may be a parameter, or a view of one, is copied by an operator: only operators gather
// parameters that ZeRO stage 3 has released.
at::Tensor taken(const char* call, const at::Tensor& tensor) {
  require(tensor.defined() && tensor.layout() == at::kStrided, call, ": expected a dense tensor, found ",
          ds::describe(tensor));
  at::Tensor plain = whole_of(tensor);
  return plain.requires_grad() && (plain.is_leaf() || plain.is_view()) ? plain.clone() : plain;
}

int64_t checked_dim(const char* call, const at::Tensor& tensor, int64_t dim) {
  require(dim >= -tensor.dim() && dim < tensor.dim(), call, ": dim: expected a dimension of the tensor, found ", dim,
          " with ", ds::describe(tensor), tensor.dim() == 0 ? "; make it one row: tensor.unsqueeze(0)" : "");
  return dim < 0 ? dim + tensor.dim() : dim;
}

void require_sum(const char* call, const at::Tensor& tensor, comm::ReduceOp op) {
  require(op == comm::ReduceOp::kSum || op == comm::ReduceOp::kAvg, call, ": op: expected kSum or kAvg, which have a ",
          "gradient, found another one; call group.all_reduce(tensor.detach(), op) where none is needed");
  require(op == comm::ReduceOp::kSum || tensor.is_floating_point(), call,
          ": expected floating-point numbers for kAvg, found ", ds::describe(tensor));
}

at::Tensor divided(const at::Tensor& sum, comm::ReduceOp op, const comm::Communicator& group) {
  return op == comm::ReduceOp::kAvg ? sum / static_cast<double>(group.size()) : sum;
}

// Lets ranks meet that exchange no element, so that one that does exchange some gets an error.
void meet_if_empty(const char* call, const at::Tensor& tensor, comm::Communicator& group) {
  if (tensor.numel() == 0 && group.size() > 1) group.barrier(cat(call, " without elements"));
}

void require_splits(const std::vector<int64_t>& splits, const char* name, const comm::Communicator& group) {
  const bool fit = static_cast<int>(splits.size()) == group.size() &&
                   std::all_of(splits.begin(), splits.end(), [](int64_t rows) { return rows >= 0; });
  require(fit, "all_to_all: ", name, ": expected a number of rows, 0 or more, for each of the ", group.size(),
          " ranks, found ", c10::IntArrayRef(splits));
}

}  // namespace

at::Tensor all_gather(const at::Tensor& tensor, comm::Communicator& group, int64_t dim) {
  const at::Tensor part = taken("all_gather", tensor);
  const int64_t along = checked_dim("all_gather", part, dim);
  meet_if_empty("all_gather", part, group);
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes[static_cast<size_t>(along)] *= group.size();
  return joined_for_parts(part, {.axis = axis_over(group), .cut = Cut{.dim = along}}, sizes);
}

at::Tensor all_reduce(const at::Tensor& tensor, comm::Communicator& group, comm::ReduceOp op) {
  const at::Tensor addend = taken("all_reduce", tensor);
  require_sum("all_reduce", addend, op);
  return divided(summed_for_parts(addend, axis_over(group)), op, group);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, comm::Communicator& group, int64_t dim, comm::ReduceOp op) {
  const at::Tensor addend = taken("reduce_scatter", tensor);
  const int64_t along = checked_dim("reduce_scatter", addend, dim);
  require_sum("reduce_scatter", addend, op);
  require(addend.size(along) % group.size() == 0, "reduce_scatter: expected dimension ", along, " to divide by the ",
          group.size(), " ranks of group ", group.name(), ", found ", ds::describe(addend));
  meet_if_empty("reduce_scatter", addend, group);
  const Placement placement{.axis = axis_over(group), .cut = Cut{.dim = along}};
  return divided(summed_to_part(addend, placement), op, group);
}

at::Tensor all_to_all(const at::Tensor& tensor, comm::Communicator& group, const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits) {
  const at::Tensor rows = taken("all_to_all", tensor);
  checked_dim("all_to_all", rows, 0);
  require(output_splits.empty() == input_splits.empty(), "all_to_all: expected output_splits and input_splits, or ",
          "neither, found ", output_splits.empty() ? "input_splits" : "output_splits", " alone");
  if (input_splits.empty()) {
    require(rows.size(0) % group.size() == 0, "all_to_all: expected dimension 0 to divide by the ", group.size(),
            " ranks of group ", group.name(), ", found ", ds::describe(rows), "; pass output_splits and input_splits");
  } else {
    require_splits(input_splits, "input_splits", group);
    require_splits(output_splits, "output_splits", group);
    const int64_t sum = std::accumulate(input_splits.begin(), input_splits.end(), int64_t{0});
    require(sum == rows.size(0), "all_to_all: input_splits: expected numbers that add up to the ", rows.size(0),
            " rows, found ", sum);
  }
  return rows_exchanged(rows, axis_over(group), {.sent = input_splits, .received = output_splits});
}

}  // namespace ds::parallel
