#include "layers/fp8/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/replay/own_results.h"
#include "core/replay/replayed_values.h"
#include "core/tensor_table.h"
#include "core/torch_version/node.h"
#include "core/transposed.h"
#include "layers/fp8/product.h"
#include "layers/layer_class.h"
#include "layers/layer_operators.h"

namespace ds::fp8 {
namespace {

namespace autograd = torch::autograd;

TensorTable<std::shared_ptr<const Fp8Layer>>& layers_by_weight() {
  static TensorTable<std::shared_ptr<const Fp8Layer>> table;
  return table;
}

// The weight of a Linear layer; undefined where the module is none.
at::Tensor weight_if_linear(const torch::nn::Module& module) {
  const bool is_linear = dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr ||
                         layers::class_of(module).find("Linear") != std::string_view::npos ||
                         layers::has_inputs_first(module);
  if (!is_linear) return {};
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const weight = parameters.find("weight");
  return weight != nullptr && weight->dim() == 2 ? *weight : at::Tensor();
}

at::Tensor rows_of(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// A layer at work: the same scales in forward, in backward, and where forward is computed again.
struct LayerInUse {
  std::shared_ptr<const Fp8Layer> layer;
  std::shared_ptr<Scaling> scaling;
  at::Tensor scales;  // undefined with blocks

  const ScalingOptions& options() const { return scaling->options(); }

  Quantized input(const at::Tensor& rows, bool records) const {
    if (options().blocks) return quantize_rows(rows, kE4M3, options().margin);
    return scaling->quantized(rows, layer->index, Kind::kInput, scales, records);
  }
  // [out, in], of a weight as the layer has it.
  Quantized weight(const at::Tensor& stored, bool records) const {
    const at::Tensor values = layer->inputs_first ? stored.t() : stored;
    if (options().blocks) return quantize_blocks(values, kE4M3, options().margin);
    return scaling->quantized(values, layer->index, Kind::kWeight, scales, records);
  }
  Quantized gradient(const at::Tensor& rows) const {
    if (options().blocks) return quantize_rows(rows, options().gradients, options().margin);
    return scaling->quantized(rows, layer->index, Kind::kGradient, scales, /*records=*/true);
  }
};

class Fp8LinearBackward : public layers::LayerBackward {
 public:
  Fp8LinearBackward(LayerInUse layer, const at::Tensor& input, const at::Tensor& weight)
      : LayerBackward(weight.requires_grad() ? input : at::Tensor(), input.requires_grad() ? weight : at::Tensor()),
        layer_(std::move(layer)),
        input_sizes_(input.sizes().vec()),
        type_(input.scalar_type()) {}

  std::string name() const override { return "Fp8LinearBackward"; }
  // A pipeline may run it twice, for the input's gradient and for the weight's: it computes what it is asked for.
  bool is_traceable() override { return true; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    require(!at::GradMode::is_enabled(), "fp8, layer ", layer_.layer->name,
            ": backward with create_graph: expected first derivatives only, found a double backward through FP8; ",
            "leave the layer out (fp8.exclude)");
    require_unreleased();
    autograd::variable_list result(3);
    if (!gradients[0].defined()) return result;
    const at::Tensor gradient = rows_of(gradients[0]);
    const bool of_weight = task_should_compute_output(1);
    const bool weight_on_fp8 = of_weight && layer_.options().weight_gradients;
    Quantized quantized;
    if (task_should_compute_output(0) || weight_on_fp8) quantized = layer_.gradient(gradient);
    if (task_should_compute_output(0)) result[0] = of_input(quantized);
    if (of_weight) result[1] = weight_on_fp8 ? of_weight_on_fp8(quantized) : of_weight_as_it_is(gradient);
    if (task_should_compute_output(2)) result[2] = gradient.sum(0);
    return result;
  }

 private:
  ProductOptions options() const { return {.type = type_, .arithmetic = layer_.options().arithmetic}; }

  // Rows of the gradient times the weight: scales of blocks are those of forward, as a weight's blocks are square.
  at::Tensor of_input(const Quantized& gradient) {
    const Quantized quantized = layer_.weight(weight(), /*records=*/false);
    return at::_unsafe_view(product(gradient, transposed(quantized), {}, options()), input_sizes_);
  }

  // The gradient of the weight lies as the weight does: gradient x input, or input x gradient.
  at::Tensor of_weight_on_fp8(const Quantized& gradient) {
    const Quantized rows = layer_.input(rows_of(input()), /*records=*/false);
    return layer_.layer->inputs_first ? product_over_rows(rows, gradient, options())
                                      : product_over_rows(gradient, rows, options());
  }
  at::Tensor of_weight_as_it_is(const at::Tensor& gradient) {
    const at::Tensor rows = rows_of(input());
    return layer_.layer->inputs_first ? at::mm(rows.t(), gradient) : at::mm(gradient.t(), rows);
  }

  const LayerInUse layer_;
  const std::vector<int64_t> input_sizes_;
  const at::ScalarType type_;
};

// W W^T, as of a penalty on the weight, is no product of a layer.
bool is_part_of(const at::Tensor& input, const at::Tensor& weight) {
  if (!input.has_storage() || !weight.has_storage() || !input.is_alias_of(weight)) return false;
  const int64_t distance = input.storage_offset() - weight.storage_offset();
  return distance >= 0 && distance < weight.numel();
}

struct Operands {
  at::Tensor input, weight, bias;  // without a weight: it is no layer's; without a bias: there is none
  bool inputs_first = false;       // the weight is multiplied with as [in, out]

  int64_t inputs() const { return weight.size(inputs_first ? 0 : 1); }
  int64_t outputs() const { return weight.size(inputs_first ? 1 : 0); }
};

// Null: the kernel behind computes it.
std::shared_ptr<const Fp8Layer> layer_of(const Operands& of) {
  if (c10::InferenceMode::is_enabled()) return nullptr;  // also under autocast, whose keys are above autograd's
  if (!of.weight.defined() || of.weight.dim() != 2 || of.input.is_meta() || of.input.dim() == 0) return nullptr;
  auto layer = find_layer(of.weight);
  const bool is_its_product = layer && layer->inputs_first == of.inputs_first && !is_part_of(of.input, of.weight);
  return is_its_product ? std::move(layer) : nullptr;
}

// None: the kernel behind computes it, and what does not fit is LibTorch's to refuse.
std::optional<LayerInUse> in_use(std::shared_ptr<const Fp8Layer> layer, const Operands& of) {
  auto scaling = layer->scaling.lock();
  if (!scaling || of.input.scalar_type() != of.weight.scalar_type() || of.input.size(-1) != of.inputs()) {
    return std::nullopt;
  }
  scaling->note_use(layer->index);
  LayerInUse result{std::move(layer), std::move(scaling), {}};
  if (result.options().recipe == Recipe::kDelayed) {
    const int64_t generation = ReplayTape::replayed([&] { return result.scaling->generation(); });
    result.scales = result.scaling->scales(generation);
  }
  return result;
}

at::Tensor output_of(const LayerInUse& layer, const Operands& of) {
  // What is computed without a graph is evaluation, or a region's first run, which comes again with one.
  const bool records = at::GradMode::is_enabled();
  const at::AutoGradMode no_graph(false);
  const Quantized rows = layer.input(rows_of(of.input.detach()), records);
  const Quantized of_weight = layer.weight(of.weight.detach(), records);
  const at::Tensor result =
      product(rows, of_weight, of.bias.defined() ? of.bias.detach() : of.bias,
              {.type = of.input.scalar_type(), .arithmetic = layer.options().arithmetic, .fast_accumulation = true});
  std::vector<int64_t> sizes = of.input.sizes().vec();
  sizes.back() = of.outputs();
  return at::_unsafe_view(result, sizes);  // a view could not be changed in place, as torch's Linear does
}

at::Tensor compute(LayerInUse layer, const Operands& of) {
  OwnResults::note();
  at::Tensor output = output_of(layer, of);
  layers::set_backward(output, of.input, of.weight, of.bias,
                       [&] { return make_node<Fp8LinearBackward>(std::move(layer), of.input, of.weight); });
  return output;
}

using FindOperands = Operands (*)(const c10::IValue* arguments);

Operands of_linear(const c10::IValue* arguments) {
  return {arguments[0].toTensor(), arguments[1].toTensor(),
          arguments[2].isTensor() ? arguments[2].toTensor() : at::Tensor()};
}

// torch::nn::Linear without a bias, or of more than two dimensions.
Operands of_matmul(const c10::IValue* arguments) {
  return {arguments[0].toTensor(), base_of_transposed(arguments[1].toTensor()), {}};
}

// torch::nn::Linear of two dimensions: addmm(bias, input, weight.t()). Conv1D: addmm(bias, input, weight).
Operands of_addmm(const c10::IValue* arguments) {
  const at::Tensor matrix = arguments[2].toTensor();
  const at::Tensor base = base_of_transposed(matrix);
  Operands result{arguments[1].toTensor(), base.defined() ? base : matrix, arguments[0].toTensor(), !base.defined()};
  const bool is_sum = arguments[3].toScalar().equal(1) && arguments[4].toScalar().equal(1);
  const bool fits = is_sum && matrix.dim() == 2 && result.bias.dim() == 1 && result.bias.size(0) == matrix.size(1);
  if (!fits) result.weight = at::Tensor();
  return result;
}

// Casts the operands as autocast does for a product.
Operands cast_for_product(const Operands& of, at::DeviceType device) {
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(type, tensor, device) : tensor;
  };
  return {cast(of.input), cast(of.weight), cast(of.bias), of.inputs_first};
}

// Stands in front of one operator at one key. Boxed: kernels of LibTorch that have a graph to make can be called in no
// other way.
class InFront : public c10::OperatorKernel {
 public:
  InFront(FindOperands find, std::optional<at::DeviceType> autocast_of, size_t arguments,
          c10::SafeKernelFunction behind)
      : find_(find), autocast_of_(autocast_of), count_(arguments), behind_(std::move(behind)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    Operands operands = find_(stack->data() + (stack->size() - count_));
    auto known = layer_of(operands);
    if (!known) return behind_.callBoxed(op, keys, stack);
    std::optional<c10::impl::ExcludeDispatchKeyGuard> without_autocast;
    if (autocast_of_) {
      without_autocast.emplace(c10::autocast_dispatch_keyset);
      operands = cast_for_product(operands, *autocast_of_);
    }
    auto layer = in_use(std::move(known), operands);
    if (!layer) return behind_.callBoxed(op, keys, stack);
    torch::jit::drop(*stack, count_);
    torch::jit::push(*stack, compute(*std::move(layer), operands));
  }

 private:
  const FindOperands find_;
  const std::optional<at::DeviceType> autocast_of_;  // none: it stands at a key below
  const size_t count_;                               // of the operator's arguments
  const c10::SafeKernelFunction behind_;
};

struct Place {
  c10::DispatchKey key;
  std::optional<at::DeviceType> autocast_of;
};
constexpr std::array<Place, 4> kPlaces = {
    Place{c10::DispatchKey::AutocastCPU, at::kCPU}, Place{c10::DispatchKey::AutocastCUDA, at::kCUDA},
    Place{c10::DispatchKey::AutogradCPU, std::nullopt}, Place{c10::DispatchKey::AutogradCUDA, std::nullopt}};

void put_in_front_of(const char* name, FindOperands find) {
  for (const Place& place : kPlaces) layers::put_in_front_of<InFront>(name, "", place.key, find, place.autocast_of);
}

// Idempotent; any thread.
void register_fp8_linear() {
  [[maybe_unused]] static const bool kDone = [] {
    put_in_front_of("aten::linear", of_linear);
    put_in_front_of("aten::matmul", of_matmul);
    put_in_front_of("aten::addmm", of_addmm);
    return true;
  }();
}

}  // namespace

std::vector<NamedLinear> linears_of(torch::nn::Module& module) {
  std::vector<NamedLinear> result;
  std::unordered_map<const at::TensorImpl*, size_t> places;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    at::Tensor weight = weight_if_linear(*item.value());
    if (!weight.defined()) continue;
    const auto [place, is_new] = places.emplace(weight.unsafeGetTensorImpl(), result.size());
    if (is_new) result.push_back({{}, std::move(weight), layers::has_inputs_first(*item.value())});
    result[place->second].names.push_back(item.key().empty() ? "itself" : item.key());
  }
  return result;
}

void set_layers(const std::vector<NamedLinear>& layers, const std::shared_ptr<Scaling>& scaling) {
  ensure(layers.size() == scaling->layers().size(), "scales are of these layers");
  if (layers.empty()) return;
  register_fp8_linear();
  auto& table = layers_by_weight();
  table.drop([](const auto& layer) { return layer->scaling.expired(); });
  for (size_t i = 0; i < layers.size(); ++i) {
    table.set(layers[i].weight, std::make_shared<const Fp8Layer>(Fp8Layer{layers[i].name(), static_cast<int64_t>(i),
                                                                          layers[i].inputs_first, scaling}));
  }
}

std::shared_ptr<const Fp8Layer> find_layer(const at::Tensor& weight) { return layers_by_weight().find(weight); }

}  // namespace ds::fp8
