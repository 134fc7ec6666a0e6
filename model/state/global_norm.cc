#include "model/state/global_norm.h"

#include <ATen/ops/scalar_tensor.h>

#include <cmath>

#include "dsengine/comm.h"
#include "model/state/row_wise.h"
#include "zero/square_sum.h"

namespace ds::engine {
namespace {

const SquareGroup& squares_of(const Axis& axis, const ModelState& state) {
  return state.gradients.reducer->keeps_local() ? axis.local_squares : axis.squares;
}

zero::SquareSum own_squares(const ModelState& state) {
  zero::SquareSum sum;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (!state.counts(b)) continue;
    sum.add(state.is_row_wise(b) ? own_rows(state, b).values.reshape({-1}) : state.gradients.reducer->gradient(b));
  }
  return sum;
}

void add_over_ranks(double& squares, comm::Communicator& ranks, c10::Device device) {
  if (ranks.size() == 1) return;
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor total = at::scalar_tensor(squares, options).view({1});
  ranks.all_reduce(total, comm::ReduceOp::kSum, "gradient norm").wait();
  squares = total.item<double>();
}

at::Tensor norm_on_device(const ModelState& state, const zero::SquareSum& own) {
  const at::Tensor squares = own.total_on(state.ranks.device);
  for (const Axis& axis : state.axes->list) {
    const SquareGroup& group = squares_of(axis, state);
    if (group.ranks == nullptr) continue;
    if (group.ranks->size() > 1) group.ranks->all_reduce(squares, comm::ReduceOp::kSum, "gradient norm").wait();
    if (group.factor != 1.0) squares.mul_(group.factor);
  }
  const at::Tensor& norm = squares.sqrt_();
  return state.plan.model_dtype == DType::kFloat64 ? norm : norm.to(at::kFloat).to(at::kDouble);
}

}  // namespace

at::Tensor global_norm_on_device(const ModelState& state) { return norm_on_device(state, own_squares(state)); }

// Beside a GPU all ranks issue the same collectives, wherever each of them has its gradients.
double global_norm(const ModelState& state) {
  const zero::SquareSum own = own_squares(state);
  if (!state.ranks.device.is_cpu()) {
    // A norm that is not finite is so on all ranks, and is looked into below.
    if (const auto value = norm_on_device(state, own).item<double>(); std::isfinite(value)) return value;
  }
  double squares = own.total();
  for (const Axis& axis : state.axes->list) {
    const SquareGroup& group = squares_of(axis, state);
    if (group.ranks == nullptr) continue;
    add_over_ranks(squares, *group.ranks, state.ranks.device);
    squares *= group.factor;
  }
  // Sums over other buckets or slices differ in the last bits of a double; none reaches an update in float32.
  const double norm = std::sqrt(squares);
  return state.plan.model_dtype == DType::kFloat64 ? norm : static_cast<double>(static_cast<float>(norm));
}

}  // namespace ds::engine
