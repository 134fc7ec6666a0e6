#include "fp8/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/replay/replayed_values.h"
#include "core/transposed.h"
#include "fp8/linear_table.h"

namespace ds::fp8 {
namespace {

namespace autograd = torch::autograd;
using MaybeTensor = std::optional<at::Tensor>;

at::Tensor rows_of(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// A layer at work: the same scales in forward, in backward, and where forward is computed again.
struct LayerInUse {
  std::string name;
  int64_t index = 0;
  std::shared_ptr<Scaling> scaling;
  at::Tensor scales;  // undefined with blocks

  const ScalingOptions& options() const { return scaling->options(); }

  Quantized input(const at::Tensor& rows, bool records) const {
    if (options().blocks) return quantize_rows(rows, kE4M3, options().margin);
    return scaling->quantized(rows, index, Kind::kInput, scales, records);
  }
  Quantized weight(const at::Tensor& values, bool records) const {
    if (options().blocks) return quantize_blocks(values, kE4M3, options().margin);
    return scaling->quantized(values, index, Kind::kWeight, scales, records);
  }
  Quantized gradient(const at::Tensor& rows) const {
    if (options().blocks) return quantize_rows(rows, options().gradients, options().margin);
    return scaling->quantized(rows, index, Kind::kGradient, scales, /*records=*/true);
  }
};

class Fp8LinearBackward : public autograd::Node {
 public:
  Fp8LinearBackward(LayerInUse layer, const at::Tensor& input, const at::Tensor& weight)
      : layer_(std::move(layer)),
        input_sizes_(input.sizes().vec()),
        type_(input.scalar_type()),
        input_(weight.requires_grad() ? input : at::Tensor(), /*is_output=*/false),
        weight_(input.requires_grad() ? weight : at::Tensor(), /*is_output=*/false) {}

  std::string name() const override { return "Fp8LinearBackward"; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    require(!at::GradMode::is_enabled(), "fp8, layer ", layer_.name,
            ": backward with create_graph: expected first derivatives only, found a double backward through FP8; ",
            "leave the layer out (fp8.exclude)");
    TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
    autograd::variable_list result(3);
    if (!gradients[0].defined()) return result;
    const at::Tensor gradient = rows_of(gradients[0]);
    const bool of_weight = task_should_compute_output(1);
    const bool weight_on_fp8 = of_weight && layer_.options().weight_gradients;
    Quantized quantized;
    if (task_should_compute_output(0) || weight_on_fp8) quantized = layer_.gradient(gradient);
    if (task_should_compute_output(0)) result[0] = of_input(quantized);
    if (of_weight) {
      const at::Tensor input = rows_of(input_.unpack());
      result[1] = weight_on_fp8 ? product_over_rows(quantized, layer_.input(input, /*records=*/false), options())
                                : at::mm(gradient.t(), input);
    }
    if (task_should_compute_output(2)) result[2] = gradient.sum(0);
    return result;
  }

  void release_variables() override {
    input_.reset_data();
    weight_.reset_data();
    released_ = true;
  }

 private:
  ProductOptions options() const { return {.type = type_, .arithmetic = layer_.options().arithmetic}; }

  // Rows of the gradient times the weight: scales of blocks are those of forward, as a weight's blocks are square.
  at::Tensor of_input(const Quantized& gradient) {
    const Quantized weight = layer_.weight(weight_.unpack(), /*records=*/false);
    return at::_unsafe_view(product(gradient, transposed(weight), {}, options()), input_sizes_);
  }

  const LayerInUse layer_;
  const std::vector<int64_t> input_sizes_;
  const at::ScalarType type_;
  autograd::SavedVariable input_;
  autograd::SavedVariable weight_;
  bool released_ = false;
};

// W W^T, as of a penalty on the weight, is no product of a layer.
bool is_part_of(const at::Tensor& input, const at::Tensor& weight) {
  if (!input.has_storage() || !weight.has_storage() || !input.is_alias_of(weight)) return false;
  const int64_t distance = input.storage_offset() - weight.storage_offset();
  return distance >= 0 && distance < weight.numel();
}

// None: LibTorch computes it.
std::optional<LayerInUse> layer_of(const at::Tensor& input, const at::Tensor& weight) {
  if (input.is_meta() || weight.dim() != 2 || input.dim() == 0) return std::nullopt;
  const auto layer = find_layer(weight);
  if (!layer || is_part_of(input, weight)) return std::nullopt;
  auto scaling = layer->scaling.lock();
  // What does not fit is LibTorch's to refuse.
  if (!scaling || input.scalar_type() != weight.scalar_type() || input.size(-1) != weight.size(1)) return std::nullopt;
  scaling->note_use(layer->index);
  LayerInUse result{layer->name, layer->index, std::move(scaling), {}};
  if (result.options().recipe == Recipe::kDelayed) {
    const int64_t generation = ReplayTape::replayed([&] { return result.scaling->generation(); });
    result.scales = result.scaling->scales(generation);
  }
  return result;
}

at::Tensor output_of(const LayerInUse& layer, const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias) {
  // What is computed without a graph is evaluation, or a region's first run, which comes again with one.
  const bool records = at::GradMode::is_enabled();
  const at::AutoGradMode no_graph(false);
  const Quantized rows = layer.input(rows_of(input.detach()), records);
  const Quantized of_weight = layer.weight(weight.detach(), records);
  const at::Tensor result =
      product(rows, of_weight, bias.defined() ? bias.detach() : bias,
              {.type = input.scalar_type(), .arithmetic = layer.options().arithmetic, .fast_accumulation = true});
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::_unsafe_view(result, sizes);  // a view could not be changed in place, as torch's Linear does
}

// bias: undefined where there is none.
at::Tensor compute(LayerInUse layer, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  at::Tensor output = output_of(layer, input, weight, bias);
  if (!autograd::compute_requires_grad(input, weight, bias)) return output;
  const std::shared_ptr<autograd::Node> node(new Fp8LinearBackward(std::move(layer), input, weight),
                                             autograd::deleteNode);
  node->set_next_edges(autograd::collect_next_edges(input, weight, bias));
  autograd::set_history(output, node);
  return output;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias) {
  auto layer = layer_of(input, weight);
  if (!layer) return at::native::linear(input, weight, bias);
  return compute(*std::move(layer), input, weight, bias ? *bias : at::Tensor());
}

// torch::nn::Linear without a bias, or of more than two dimensions.
at::Tensor matmul(const at::Tensor& input, const at::Tensor& matrix) {
  const at::Tensor weight = base_of_transposed(matrix);
  auto layer = weight.defined() ? layer_of(input, weight) : std::nullopt;
  if (!layer) return at::native::matmul(input, matrix);
  return compute(*std::move(layer), input, weight, {});
}

// torch::nn::Linear of two dimensions: addmm(bias, input, weight.t()). Boxed, as LibTorch's own kernel, which has a
// graph to make, can be called in no other way.
void addmm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 5;
  const auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[stack->size() - kArguments + i]; };
  const at::Tensor weight = base_of_transposed(argument(2).toTensor());
  const bool is_sum = argument(3).toScalar().equal(1) && argument(4).toScalar().equal(1);
  if (weight.defined() && is_sum && argument(0).toTensor().dim() == 1) {
    const at::Tensor bias = argument(0).toTensor();
    const at::Tensor input = argument(1).toTensor();
    auto layer = bias.size(0) == weight.size(0) ? layer_of(input, weight) : std::nullopt;
    if (layer) {
      torch::jit::drop(*stack, kArguments);
      torch::jit::push(*stack, compute(*std::move(layer), input, weight, bias));
      return;
    }
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::Autograd, *stack);
}

}  // namespace

void register_fp8_linear() {
  // Never destroyed: the dispatcher may be used until the process ends. Used by nobody, and kept where leak checkers
  // find it.
  [[gnu::used]] static const auto* const kRegistrations = [] {
    auto* const libraries = new std::vector<torch::Library>;
    for (const c10::DispatchKey key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
      torch::Library& library = libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      library.impl("linear", TORCH_FN(linear));
      library.impl("matmul", TORCH_FN(matmul));
      library.impl("addmm", torch::CppFunction::makeFromBoxedFunction<&addmm>());
    }
    return libraries;
  }();
}

}  // namespace ds::fp8
