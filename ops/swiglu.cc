#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "core/check.h"
#include "core/host_threads.h"
#include "dsengine/ops.h"
#include "ops/kernels/swiglu_kernel.h"
#include "ops/on_device.h"
#include "ops/recorded_operator.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSwiglu = "dsengine::swiglu";

// As [rows, columns] with neighbours in memory, a view where that can be.
at::Tensor rows_of(const at::Tensor& tensor) {
  const int64_t columns = tensor.size(-1);
  const at::Tensor rows = tensor.reshape({columns == 0 ? 0 : tensor.numel() / columns, columns});
  return columns <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// body(offsets, count) for pieces that lie without gaps in all of `arrays`, [rows, columns] each; offsets: elements.
using Offsets = std::vector<int64_t>;
void for_pieces(const std::vector<at::Tensor>& arrays, const std::function<void(const Offsets&, int64_t)>& body) {
  const int64_t rows = arrays[0].size(0);
  const int64_t columns = arrays[0].size(1);
  if (rows == 0 || columns == 0) return;
  if (std::all_of(arrays.begin(), arrays.end(), [](const at::Tensor& array) { return array.is_contiguous(); })) {
    constexpr int64_t kUnit = 64;
    return for_each_range(rows * columns, kUnit, kThreadGrain,
                          [&](int64_t begin, int64_t end) { body(Offsets(arrays.size(), begin), end - begin); });
  }
  for_each_range(rows, 1, std::max<int64_t>(1, kThreadGrain / columns), [&](int64_t begin, int64_t end) {
    Offsets offsets(arrays.size());
    for (int64_t row = begin; row < end; ++row) {
      for (size_t i = 0; i < arrays.size(); ++i) offsets[i] = row * arrays[i].stride(0);
      body(offsets, columns);
    }
  });
}

// As one row where all of them lie without gaps.
RowsOf device_rows(const std::vector<at::Tensor>& arrays) {
  RowsOf of{.rows = arrays[0].size(0), .columns = arrays[0].size(1)};
  if (std::all_of(arrays.begin(), arrays.end(), [](const at::Tensor& array) { return array.is_contiguous(); })) {
    return {.rows = std::min<int64_t>(1, of.rows), .columns = arrays[0].numel()};
  }
  for (size_t a = 0; a < arrays.size(); ++a) of.strides[a] = arrays[a].stride(0);
  return of;
}

// [rows, columns] each; writes `output`.
void write_swiglu(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& output) {
  const RecordedOperator recorded(kSwiglu, {gate, up});
  const FloatType type = *float_type(gate.scalar_type());
  const SwigluForward all{type, gate.const_data_ptr(), up.const_data_ptr(), output.mutable_data_ptr()};
  if (!gate.is_cpu()) {
    const RowsOf rows = device_rows({gate, up, output});
    return on_device(kSwiglu, gate, [&](const OpsDeviceKernels& kernels, void* stream) {
      return kernels.swiglu_forward(all, rows, stream);
    });
  }
  for_pieces({gate, up, output}, [&](const Offsets& at, int64_t count) {
    swiglu_forward(
        {type, element(all.gate, type, at[0]), element(all.up, type, at[1]), element(all.output, type, at[2])}, count);
  });
}

void write_swiglu_gradients(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& gate_gradient, const at::Tensor& up_gradient) {
  const RecordedOperator recorded(kSwiglu, {gate, up});
  const FloatType type = *float_type(gate.scalar_type());
  const SwigluBackward all{type,
                           gradient.const_data_ptr(),
                           gate.const_data_ptr(),
                           up.const_data_ptr(),
                           gate_gradient.mutable_data_ptr(),
                           up_gradient.mutable_data_ptr()};
  if (!gate.is_cpu()) {
    const RowsOf rows = device_rows({gradient, gate, up, gate_gradient, up_gradient});
    return on_device(kSwiglu, gate, [&](const OpsDeviceKernels& kernels, void* stream) {
      return kernels.swiglu_backward(all, rows, stream);
    });
  }
  for_pieces({gradient, gate, up, gate_gradient, up_gradient}, [&](const Offsets& at, int64_t count) {
    swiglu_backward(
        {type, element(all.output_gradient, type, at[0]), element(all.gate, type, at[1]), element(all.up, type, at[2]),
         element(all.gate_gradient, type, at[3]), element(all.up_gradient, type, at[4])},
        count);
  });
}

void refuse_create_graph() {
  require(!at::GradMode::is_enabled(), kSwiglu, ": expected a backward pass without create_graph, its kernels ",
          "have no second derivative. Use at::silu(gate) * up for it");
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    const at::Tensor output = at::empty(gate.sizes(), gate.options());
    write_swiglu(rows_of(gate), rows_of(up), rows_of(output));
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_create_graph();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gate_gradient = at::empty(saved[0].sizes(), saved[0].options());
    const at::Tensor up_gradient = at::empty(saved[0].sizes(), saved[0].options());
    write_swiglu_gradients(rows_of(gradients[0]), rows_of(saved[0]), rows_of(saved[1]), rows_of(gate_gradient),
                           rows_of(up_gradient));
    return {gate_gradient, up_gradient};
  }
};

// Both halves of one tensor, whose gradient is one tensor too.
struct PackedSwiglu : torch::autograd::Function<PackedSwiglu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    std::vector<int64_t> sizes = gate_up.sizes().vec();
    sizes.back() /= 2;
    const at::Tensor output = at::empty(sizes, gate_up.options());
    const at::Tensor rows = rows_of(gate_up);
    write_swiglu(rows.narrow(1, 0, sizes.back()), rows.narrow(1, sizes.back(), sizes.back()), rows_of(output));
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_create_graph();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor rows = rows_of(saved[0]);
    const int64_t half = rows.size(1) / 2;
    const at::Tensor gradient = at::empty(saved[0].sizes(), saved[0].options());
    const at::Tensor to = rows_of(gradient);
    write_swiglu_gradients(rows_of(gradients[0]), rows.narrow(1, 0, half), rows.narrow(1, half, half),
                           to.narrow(1, 0, half), to.narrow(1, half, half));
    return {gradient};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  require(gate.defined() && up.defined() && gate.dim() >= 1 && gate.sizes() == up.sizes() &&
              gate.device() == up.device() && is_floating(gate.scalar_type()) && is_floating(up.scalar_type()),
          kSwiglu, ": expected floating-point gate and up of one shape and device, found ", lazy([&] {
            return gate.defined() && up.defined()
                       ? cat(gate.sizes(), " of ", gate.scalar_type(), " and ", up.sizes(), " of ", up.scalar_type())
                       : "an undefined tensor";
          }));
  const at::ScalarType common = c10::promoteTypes(gate.scalar_type(), up.scalar_type());
  if (has_kernel(gate) && float_type(common)) return Swiglu::apply(gate.to(common), up.to(common));
  return at::silu(gate) * up;
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  require(gate_up.defined() && gate_up.dim() >= 1 && gate_up.size(-1) % 2 == 0 && is_floating(gate_up.scalar_type()),
          kSwiglu, ": expected a floating-point tensor of [..., 2 F], gate and up one behind the other, found ",
          lazy([&] { return gate_up.defined() ? cat(gate_up.sizes(), " of ", gate_up.scalar_type()) : "none"; }));
  if (has_kernel(gate_up)) return PackedSwiglu::apply(gate_up);
  const int64_t half = gate_up.size(-1) / 2;
  return at::silu(gate_up.narrow(-1, 0, half)) * gate_up.narrow(-1, half, half);
}

}  // namespace ds::ops
