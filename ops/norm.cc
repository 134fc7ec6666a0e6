#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/host_threads.h"
#include "core/split/split_tensor.h"
#include "dsengine/ops.h"
#include "ops/kernels/norm_kernel.h"
#include "ops/on_device.h"
#include "ops/recorded_operator.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

struct NormKind {
  const char* name;
  bool centered;
  double eps;
};

struct NormInput {
  at::Tensor x, residual, weight, bias;  // all but x may be undefined
};

MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

// Of the wide type, contiguous; undefined stays so.
at::Tensor wide_row(const at::Tensor& row, at::ScalarType type) {
  return row.defined() ? row.detach().to(wide_type(type)).contiguous() : row;
}

const void* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

void check_norm(const NormKind& kind, const NormInput& input) {
  const at::Tensor& x = input.x;
  require(x.defined() && x.dim() >= 1 && x.size(-1) > 0 && is_floating(x.scalar_type()), kind.name,
          ": expected x of [..., size] with size > 0 in float32, float64, bfloat16 or float16, found ",
          lazy([&] { return x.defined() ? cat(x.sizes(), " of ", x.scalar_type()) : "an undefined tensor"; }));
  const at::Tensor& residual = input.residual;
  require(!residual.defined() ||
              (residual.sizes() == x.sizes() && is_floating(residual.scalar_type()) && residual.device() == x.device()),
          kind.name, ": expected a residual of x's shape ", x.sizes(), ", on its device, found ",
          lazy([&] { return cat(residual.sizes(), " of ", residual.scalar_type(), " on ", residual.device()); }));
  for (const at::Tensor* row : {&input.weight, &input.bias}) {
    require(!row->defined() || (row->dim() == 1 && row->size(0) == x.size(-1) && is_floating(row->scalar_type()) &&
                                row->device() == x.device()),
            kind.name, ": expected weight and bias of [", x.size(-1), "] on x's device, found ",
            lazy([&] { return cat(row->sizes(), " of ", row->scalar_type(), " on ", row->device()); }));
  }
}

struct NormOutput {
  at::Tensor normed, sum, mean, rstd;
};

NormOutput norm_forward_of(const NormKind& kind, const NormInput& given) {
  const at::ScalarType type = given.x.scalar_type();
  const RecordedOperator recorded(kind.name, {given.x, given.residual, given.weight, given.bias});
  const NormInput input{given.x.contiguous(), given.residual.defined() ? given.residual.contiguous() : at::Tensor(),
                        wide_row(given.weight, type), wide_row(given.bias, type)};
  const int64_t size = input.x.size(-1);
  const int64_t rows = input.x.numel() / size;
  const at::TensorOptions wide = input.x.options().dtype(wide_type(type));
  NormOutput output{.normed = at::empty(input.x.sizes(), input.x.options()), .rstd = at::empty({rows}, wide)};
  if (input.residual.defined()) output.sum = at::empty(input.x.sizes(), input.x.options());
  if (kind.centered) output.mean = at::empty({rows}, wide);
  const NormForward norm{.type = *float_type(type),
                         .size = size,
                         .eps = kind.eps,
                         .input = data_of(input.x),
                         .residual = data_of(input.residual),
                         .sum = output.sum.defined() ? output.sum.mutable_data_ptr() : nullptr,
                         .weight = data_of(input.weight),
                         .bias = data_of(input.bias),
                         .output = output.normed.mutable_data_ptr(),
                         .mean = kind.centered ? output.mean.mutable_data_ptr() : nullptr,
                         .rstd = output.rstd.mutable_data_ptr()};
  if (!input.x.is_cpu()) {
    on_device(kind.name, input.x,
              [&](const OpsDeviceKernels& kernels, void* stream) { return kernels.norm_forward(norm, rows, stream); });
    return output;
  }
  for_each_range(rows, 1, std::max<int64_t>(1, kThreadGrain / size),
                 [&](int64_t begin, int64_t end) { norm_forward(norm, begin, end); });
  return output;
}

struct NormGradients {
  at::Tensor input, weight, bias;
};

struct NormSaved {
  at::Tensor input, weight, mean, rstd;
};

// Rows go into a fixed number of blocks, whatever the threads or the device's processors: a block adds up its gradients
// of weight and bias, and the sum over blocks is the same on any machine of its kind.
NormBlocks norm_blocks(const at::Tensor& input, int64_t rows) {
  constexpr int64_t kMostBlocks = 32;
  constexpr int64_t kMostOnDevice = 512;
  const int64_t most = std::min(input.is_cpu() ? kMostBlocks : kMostOnDevice, std::max<int64_t>(rows, 1));
  const int64_t wanted = input.is_cpu() ? input.numel() / (2 * kThreadGrain) : rows;
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, most);
  return {rows, blocks, (rows + blocks - 1) / blocks};
}

void run_norm_backward(const char* name, const at::Tensor& input, const NormBackward& norm, const NormBlocks& blocks) {
  if (!input.is_cpu()) {
    return on_device(name, input, [&](const OpsDeviceKernels& kernels, void* stream) {
      return kernels.norm_backward(norm, blocks, stream);
    });
  }
  const size_t part_bytes = static_cast<size_t>(norm.size) * wide_bytes_of(norm.type);
  const auto part = [&](void* sums, int64_t block) -> void* {
    return sums == nullptr ? nullptr : static_cast<char*>(sums) + static_cast<size_t>(block) * part_bytes;
  };
  for_each_range(blocks.blocks, 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      NormBackward own = norm;
      own.weight_gradient = part(norm.weight_gradient, block);
      own.bias_gradient = part(norm.bias_gradient, block);
      norm_backward(own, std::min(blocks.rows, block * blocks.length),
                    std::min(blocks.rows, (block + 1) * blocks.length));
    }
  });
}

NormGradients norm_backward_of(const char* name, const NormSaved& saved, const at::Tensor& output_gradient,
                               const at::Tensor& sum_gradient, bool wants_weight, bool wants_bias) {
  const at::ScalarType type = saved.input.scalar_type();
  const RecordedOperator recorded(name, {saved.input, saved.weight});
  const at::Tensor input = saved.input.contiguous();
  const at::Tensor weight = wide_row(saved.weight, type);
  const at::Tensor dy = output_gradient.contiguous();
  const at::Tensor more = sum_gradient.defined() ? sum_gradient.contiguous() : at::Tensor();
  const int64_t size = input.size(-1);
  const NormBlocks blocks = norm_blocks(input, input.numel() / size);
  const at::Tensor parts =
      at::empty({wants_weight || wants_bias ? 2 : 0, blocks.blocks, size}, input.options().dtype(wide_type(type)));
  if (input.is_cpu()) parts.zero_();  // a device begins with zeros by itself
  NormGradients gradients{.input = at::empty(input.sizes(), input.options())};
  NormBackward norm{.type = *float_type(type),
                    .size = size,
                    .output_gradient = data_of(dy),
                    .sum_gradient = data_of(more),
                    .input = data_of(input),
                    .weight = data_of(weight),
                    .mean = data_of(saved.mean),
                    .rstd = data_of(saved.rstd),
                    .input_gradient = gradients.input.mutable_data_ptr()};
  if (wants_weight) norm.weight_gradient = parts[0].mutable_data_ptr();
  if (wants_bias) norm.bias_gradient = parts[1].mutable_data_ptr();
  run_norm_backward(name, input, norm, blocks);
  if (wants_weight) gradients.weight = parts[0].sum(0);
  if (wants_bias) gradients.bias = parts[1].sum(0);
  return gradients;
}

struct FusedNorm : torch::autograd::Function<FusedNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const MaybeTensor& residual,
                               const MaybeTensor& weight, const MaybeTensor& bias, const NormKind& kind) {
    const NormOutput output = norm_forward_of(
        kind, {x, residual.value_or(at::Tensor()), weight.value_or(at::Tensor()), bias.value_or(at::Tensor())});
    context->set_materialize_grads(false);
    context->save_for_backward({residual ? output.sum : x, weight.value_or(at::Tensor()), output.mean, output.rstd});
    context->saved_data["name"] = kind.name;
    if (weight) context->saved_data["weight"] = weight->scalar_type();
    if (bias) context->saved_data["bias"] = bias->scalar_type();
    context->saved_data["residual"] = residual.has_value();
    return residual ? variable_list{output.normed, output.sum} : variable_list{output.normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    require(!at::GradMode::is_enabled(), name, ": expected a backward pass without create_graph, its kernels have ",
            "no second derivative. Use at::layer_norm or at::rms_norm for it");
    const bool has_residual = context->saved_data["residual"].toBool();
    const at::Tensor sum_gradient = has_residual ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) return {sum_gradient, has_residual ? sum_gradient : at::Tensor(), {}, {}, {}};
    const variable_list saved = context->get_saved_variables();
    const auto dtype_of = [&](const char* input) {
      const auto found = context->saved_data.find(input);
      return found == context->saved_data.end() ? std::nullopt : std::optional(found->second.toScalarType());
    };
    const auto weight = dtype_of("weight");
    const auto bias = dtype_of("bias");
    const NormGradients made = norm_backward_of(name.c_str(), {saved[0], saved[1], saved[2], saved[3]}, gradients[0],
                                                sum_gradient, weight.has_value(), bias.has_value());
    return {made.input,
            has_residual ? made.input : at::Tensor(),
            weight ? made.weight.to(*weight) : at::Tensor(),
            bias ? made.bias.to(*bias) : at::Tensor(),
            {}};
  }
};

// LibTorch's operators, for devices and dtypes without a kernel. Where the dtypes differ, all is done in the wide one.
// Autocast would give float32 on some devices, where kernels give x's dtype.
at::Tensor composed_norm(const NormKind& kind, const at::Tensor& s, const at::Tensor& weight, const at::Tensor& bias) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto differs = [&](const at::Tensor& row) { return row.defined() && row.scalar_type() != s.scalar_type(); };
  if (differs(weight) || differs(bias)) {
    const at::ScalarType wide = wide_type(s.scalar_type());
    const auto cast = [&](const at::Tensor& row) { return row.defined() ? row.to(wide) : row; };
    return composed_norm(kind, s.to(wide), cast(weight), cast(bias)).to(s.scalar_type());
  }
  const int64_t size = s.size(-1);
  if (kind.centered) return at::layer_norm(s, {size}, maybe(weight), maybe(bias), kind.eps);
  return at::rms_norm(s, {size}, maybe(weight), kind.eps);
}

NormedSum normalize(const NormKind& kind, NormInput input) {
  check_norm(kind, input);
  if (input.residual.defined()) {
    const at::ScalarType common = c10::promoteTypes(input.x.scalar_type(), input.residual.scalar_type());
    input.x = input.x.to(common);
    input.residual = input.residual.to(common);
  }
  // Of tensors that are split over ranks LibTorch's operators compute each rank's part.
  const auto split = [](const at::Tensor& tensor) { return tensor.defined() && is_split(tensor); };
  const bool is_whole = !split(input.x) && !split(input.residual) && !split(input.weight) && !split(input.bias);
  if (is_whole && has_kernel(input.x)) {
    variable_list result =
        FusedNorm::apply(input.x, maybe(input.residual), maybe(input.weight), maybe(input.bias), kind);
    return {result[0], result.size() > 1 ? result[1] : at::Tensor()};
  }
  const at::Tensor s = input.residual.defined() ? input.x + input.residual : input.x;
  return {composed_norm(kind, s, input.weight, input.bias), input.residual.defined() ? s : at::Tensor()};
}

void require_residual(const char* name, const at::Tensor& residual) {
  require(residual.defined(), name,
          ": expected a residual, found an undefined tensor; without one it is the norm alone");
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return normalize({"dsengine::rms_norm", false, eps}, {x, {}, weight, {}}).normed;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return normalize({"dsengine::layer_norm", true, eps}, {x, {}, weight, bias}).normed;
}

NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps) {
  constexpr const char* kAddRmsNorm = "dsengine::add_rms_norm";
  require_residual(kAddRmsNorm, residual);
  return normalize({kAddRmsNorm, false, eps}, {x, residual, weight, {}});
}

NormedSum add_layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                         const at::Tensor& bias, double eps) {
  constexpr const char* kAddLayerNorm = "dsengine::add_layer_norm";
  require_residual(kAddLayerNorm, residual);
  return normalize({kAddLayerNorm, true, eps}, {x, residual, weight, bias});
}

}  // namespace ds::ops
