#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/host_threads.h"
#include "dsengine/ops.h"
#include "ops/kernels/rope_kernel.h"
#include "ops/on_device.h"
#include "ops/recorded_operator.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRope = "dsengine::rope";
constexpr int64_t kRowDims = 3;  // of the kernel

// As three dimensions of rows and one of channels that are neighbours in memory; a view where that can be.
struct RowView {
  at::Tensor tensor;
  int64_t position_dim;
};

RowView row_view(const at::Tensor& x, int64_t position_dim) {
  const int64_t rows = x.dim() - 1;
  at::Tensor view = x;
  if (rows > kRowDims) {
    const at::IntArrayRef sizes = x.sizes();
    const int64_t before = c10::multiply_integers(sizes.slice(0, position_dim));
    const int64_t after = c10::multiply_integers(sizes.slice(position_dim + 1, rows - position_dim - 1));
    view = x.reshape({before, x.size(position_dim), after, x.size(-1)});
    position_dim = 1;
  } else {
    for (int64_t dim = rows; dim < kRowDims; ++dim) view = view.unsqueeze(0);
    position_dim += kRowDims - rows;
  }
  if (view.size(3) > 1 && view.stride(3) != 1) view = view.contiguous();
  return {view, position_dim};
}

struct Rotation {
  at::Tensor cos, sin;  // wide [positions, pairs], contiguous
  RopeOptions options;
  int64_t position_dim;  // counted from the front
};

at::Tensor rotate_rows(const at::Tensor& x, const Rotation& rotation, bool backward) {
  const RecordedOperator recorded(kRope, {x, rotation.cos, rotation.sin});
  const RowView from = row_view(x, rotation.position_dim);
  at::Tensor to = at::empty_like(from.tensor);
  if (to.size(3) > 1 && to.stride(3) != 1) to = at::empty(from.tensor.sizes(), from.tensor.options());
  RopeRows rows{.type = *float_type(x.scalar_type()),
                .interleaved = rotation.options.pairs == RopePairs::kInterleaved,
                .backward = backward,
                .position_dim = from.position_dim,
                .pairs = rotation.cos.size(1),
                .channels = x.size(-1),
                .cos = rotation.cos.const_data_ptr(),
                .sin = rotation.sin.const_data_ptr(),
                .input = from.tensor.const_data_ptr(),
                .output = to.mutable_data_ptr()};
  int64_t count = 1;
  for (int64_t dim = 0; dim < kRowDims; ++dim) {
    rows.sizes[dim] = from.tensor.size(dim);
    rows.input_strides[dim] = from.tensor.stride(dim);
    rows.output_strides[dim] = to.stride(dim);
    count *= rows.sizes[dim];
  }
  if (!x.is_cpu()) {
    on_device(kRope, x, [&](const OpsDeviceKernels& kernels, void* stream) { return kernels.rope(rows, stream); });
    return to.reshape(x.sizes());
  }
  for_each_range(count, 1, std::max<int64_t>(1, kThreadGrain / x.size(-1)),
                 [&](int64_t begin, int64_t end) { rope_rows(rows, begin, end); });
  return to.reshape(x.sizes());
}

struct Rope : torch::autograd::Function<Rope> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Rotation& rotation) {
    context->save_for_backward({rotation.cos, rotation.sin});
    context->saved_data["interleaved"] = rotation.options.pairs == RopePairs::kInterleaved;
    context->saved_data["position_dim"] = rotation.position_dim;
    return rotate_rows(x, rotation, /*backward=*/false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(), kRope, ": expected a backward pass without create_graph, its kernels ",
            "have no second derivative");
    const variable_list saved = context->get_saved_variables();
    const bool interleaved = context->saved_data["interleaved"].toBool();
    const Rotation rotation{.cos = saved[0],
                            .sin = saved[1],
                            .options = {.pairs = interleaved ? RopePairs::kInterleaved : RopePairs::kHalves},
                            .position_dim = context->saved_data["position_dim"].toInt()};
    return {rotate_rows(gradients[0], rotation, /*backward=*/true), {}};
  }
};

// LibTorch's operators, for devices and dtypes without a kernel.
at::Tensor composed_rope(const at::Tensor& x, const Rotation& rotation) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[static_cast<size_t>(rotation.position_dim)] = x.size(rotation.position_dim);
  shape.back() = rotation.cos.size(1);
  const at::Tensor cos = rotation.cos.view(shape);
  const at::Tensor sin = rotation.sin.view(shape);
  const int64_t pairs = rotation.cos.size(1);
  const at::Tensor wide = x.to(cos.scalar_type());
  const at::Tensor rest = wide.narrow(-1, 2 * pairs, x.size(-1) - 2 * pairs);
  if (rotation.options.pairs == RopePairs::kHalves) {
    const at::Tensor a = wide.narrow(-1, 0, pairs);
    const at::Tensor b = wide.narrow(-1, pairs, pairs);
    return at::cat({a * cos - b * sin, b * cos + a * sin, rest}, -1).to(x.scalar_type());
  }
  const at::Tensor both = wide.narrow(-1, 0, 2 * pairs).unflatten(-1, {pairs, 2});
  const at::Tensor a = both.select(-1, 0);
  const at::Tensor b = both.select(-1, 1);
  const at::Tensor turned = at::stack({a * cos - b * sin, b * cos + a * sin}, -1).flatten(-2);
  return at::cat({turned, rest}, -1).to(x.scalar_type());
}

int64_t checked_position_dim(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                             const RopeOptions& options) {
  require(x.defined() && x.dim() >= 2 && is_floating(x.scalar_type()), kRope,
          ": expected x of [..., positions, ..., channels] in float32, float64, bfloat16 or float16, found ",
          lazy([&] { return x.defined() ? cat(x.sizes(), " of ", x.scalar_type()) : "an undefined tensor"; }));
  const int64_t dim = options.position_dim < 0 ? options.position_dim + x.dim() : options.position_dim;
  require(dim >= 0 && dim < x.dim() - 1, kRope, ": expected position_dim to name one of the ", x.dim() - 1,
          " dimensions before the channels, found ", options.position_dim);
  for (const at::Tensor* table : {&cos, &sin}) {
    require(table->defined() && table->dim() == 2 && table->sizes() == cos.sizes() && table->size(0) >= x.size(dim) &&
                table->size(1) > 0 && 2 * table->size(1) <= x.size(-1) && is_floating(table->scalar_type()) &&
                table->device() == x.device(),
            kRope, ": expected cos and sin of [at least ", x.size(dim), " positions, at most ", x.size(-1) / 2,
            " pairs] on x's device, found ", lazy([&] { return table->defined() ? cat(table->sizes()) : "none"; }));
    require(!table->requires_grad(), kRope, ": expected tables without a gradient, found that cos or sin requires one");
  }
  return dim;
}

}  // namespace

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const RopeOptions& options) {
  const int64_t position_dim = checked_position_dim(x, cos, sin, options);
  const at::ScalarType wide = wide_type(x.scalar_type());
  const int64_t positions = x.size(position_dim);
  const auto table_of = [&](const at::Tensor& table) { return table.narrow(0, 0, positions).to(wide).contiguous(); };
  const Rotation rotation{table_of(cos), table_of(sin), options, position_dim};
  if (has_kernel(x)) return Rope::apply(x, rotation);
  return composed_rope(x, rotation);
}

RopeTables rope_tables(int64_t positions, int64_t channels, double base, const at::TensorOptions& options) {
  require(positions >= 0 && channels >= 2 && channels % 2 == 0 && base > 0.0, kRope,
          ": expected positions >= 0, an even number of channels and a base > 0, found ", positions, ", ", channels,
          " and ", base);
  const at::Tensor exponents = at::arange(0, channels, 2, at::kDouble) / static_cast<double>(channels);
  const at::Tensor angles = at::outer(at::arange(positions, at::kDouble), at::pow(base, exponents.neg()));
  return {angles.cos().to(options), angles.sin().to(options)};
}

}  // namespace ds::ops
