// Operators of compressed layers: ours change the operands and hand them to the kernel that was there before, at the
// key where the operator comes in.
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/replay/own_results.h"
#include "core/transposed.h"
#include "layers/compressed/compressed_model.h"
#include "layers/layer_operators.h"

namespace ds::model_compression {
namespace {

// How an operator has a layer's weight. torch::nn's Linear is no linear: it is addmm with the weight transposed, or
// matmul, and add_ of the bias. A layer that has its weight as [inputs, outputs] gives it as it is where others
// transpose.
enum class Role { kWeight, kTransposed, kAddedBias };

// Where the operands are among the arguments.
struct Places {
  Role role;
  LayerKind kind;
  std::optional<size_t> input, weight, bias;
};

struct Intercepted {
  const char* name;
  const char* overload;
  Places places;
};
constexpr std::array<Intercepted, 7> kOperators = {
    Intercepted{"aten::linear", "", {Role::kWeight, LayerKind::kLinear, 0, 1, 2}},
    Intercepted{"aten::addmm", "", {Role::kTransposed, LayerKind::kLinear, 1, 2, 0}},
    Intercepted{"aten::matmul", "", {Role::kTransposed, LayerKind::kLinear, 0, 1, std::nullopt}},
    Intercepted{"aten::add_", "Tensor", {Role::kAddedBias, LayerKind::kLinear, std::nullopt, std::nullopt, 1}},
    Intercepted{"aten::conv2d", "", {Role::kWeight, LayerKind::kConv2d, 0, 1, 2}},
    Intercepted{"aten::conv2d", "padding", {Role::kWeight, LayerKind::kConv2d, 0, 1, 2}},
    Intercepted{"aten::embedding", "", {Role::kWeight, LayerKind::kEmbedding, std::nullopt, 0, std::nullopt}}};

using Key = c10::DispatchKey;

// While a layer is computed on this thread: operators inside, those of the same operator at the keys below too, have
// its operands already.
bool& is_inside() {
  thread_local bool inside = false;
  return inside;
}
class Inside {
 public:
  Inside() { is_inside() = true; }
  ~Inside() { is_inside() = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// The last product on this thread of each layer whose bias changes: add_ of the bias is the layer's on that alone, and
// anything else may add the same tensor to something of its own.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
std::unordered_map<const CompressedLayer*, WeakTensor>& last_products() {
  thread_local std::unordered_map<const CompressedLayer*, WeakTensor> products;
  return products;
}

void note_product(const Places& places, const CompressedLayer& layer, const c10::IValue& output) {
  if (places.role == Role::kAddedBias || places.kind != LayerKind::kLinear || !layer.changes_bias()) return;
  last_products().insert_or_assign(&layer, WeakTensor(output.toTensor().getIntrusivePtr()));
}

// add_(product, bias, alpha) of the layer.
bool adds_to_product(const CompressedLayer& layer, const c10::IValue* arguments) {
  const auto found = last_products().find(&layer);
  return found != last_products().end() && !found->second.expired() && arguments[0].isTensor() &&
         found->second._unsafe_get_target() == arguments[0].toTensor().unsafeGetTensorImpl() &&
         arguments[2].toScalar().equal(1);
}

// Undefined: this is no operator of a layer.
at::Tensor tensor_of_layer(const Places& places, const c10::IValue* arguments) {
  const c10::IValue& given = arguments[places.weight ? *places.weight : *places.bias];
  if (!given.isTensor()) return {};
  at::Tensor tensor = given.toTensor();
  // Meta: shapes alone.
  if (!tensor.defined() || tensor.is_meta()) return {};
  if (places.role != Role::kTransposed) return tensor;
  const at::Tensor base = base_of_transposed(tensor);
  return base.defined() ? base : tensor;
}

// Whether the operator multiplies with the layer's weight, `tensor`, as the layer does.
bool is_layers_product(const Places& places, const CompressedLayer& layer, const at::Tensor& tensor,
                       const c10::IValue* arguments) {
  if (layer.kind() != LayerKind::kLinear) return true;
  const bool takes_inputs_first =
      places.role == Role::kTransposed && tensor.is_same(arguments[*places.weight].toTensor());
  return layer.inputs_first() == takes_inputs_first;
}

void compress_operands(const Places& places, CompressedLayer& layer, const at::Tensor& weight, c10::IValue* arguments) {
  // Operators inside compute in the dtypes that they are given.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  if (places.input) arguments[*places.input] = layer.compressed_input(arguments[*places.input].toTensor());
  if (places.weight) {
    const at::Tensor compressed = layer.compressed_weight(weight);
    const bool transposes = places.role == Role::kTransposed && !layer.inputs_first();
    arguments[*places.weight] = transposes ? compressed.t() : compressed;
  }
  if (!places.bias || !layer.changes_bias() || !arguments[*places.bias].isTensor()) return;
  // addmm adds what it is given, a residual perhaps.
  const at::Tensor bias = arguments[*places.bias].toTensor();
  const auto module = layer.module();
  if (bias.defined() && module && bias_of(*module).is_same(bias)) {
    arguments[*places.bias] = layer.compressed_bias(bias);
  }
}

// Null: this is no operator of a layer.
std::shared_ptr<CompressedLayer> layer_of(const Places& places, const at::Tensor& tensor,
                                          const c10::IValue* arguments) {
  if (!tensor.defined()) return nullptr;
  const bool is_bias = places.role == Role::kAddedBias;
  auto layer = is_bias ? find_layer_of_bias(tensor) : find_layer(tensor, places.kind);
  const bool is_layers =
      layer && layer->module() &&
      (is_bias ? adds_to_product(*layer, arguments) : is_layers_product(places, *layer, tensor, arguments));
  return is_layers ? std::move(layer) : nullptr;
}

// Stands in front of one operator at one key.
class InFront : public c10::OperatorKernel {
 public:
  InFront(const Places& places, size_t arguments, c10::SafeKernelFunction behind)
      : places_(places), count_(arguments), behind_(std::move(behind)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    if (is_inside()) return behind_.callBoxed(op, keys, stack);
    c10::IValue* const arguments = stack->data() + (stack->size() - count_);
    const at::Tensor tensor = tensor_of_layer(places_, arguments);
    const auto layer = layer_of(places_, tensor, arguments);
    if (!layer) return behind_.callBoxed(op, keys, stack);
    OwnResults::note();
    const Inside inside;
    compress_operands(places_, *layer, tensor, arguments);
    behind_.callBoxed(op, keys, stack);
    note_product(places_, *layer, stack->back());
  }

 private:
  const Places places_;
  const size_t count_;  // of the operator's arguments
  const c10::SafeKernelFunction behind_;
};

// add_ is everywhere, and of a layer only where that changes its bias.
bool is_needed(const Intercepted& one, const std::vector<std::shared_ptr<CompressedLayer>>& layers) {
  return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
    return layer->kind() == one.places.kind && (one.places.role != Role::kAddedBias || layer->changes_bias());
  });
}

}  // namespace

void register_operators_of(const std::vector<std::shared_ptr<CompressedLayer>>& layers) {
  static std::mutex mutex;
  static std::array<bool, kOperators.size()> done = {};
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < kOperators.size(); ++i) {
    if (done[i] || !is_needed(kOperators[i], layers)) continue;
    done[i] = true;
    // From above: what comes in at one key passes those below as it is.
    for (const Key key :
         {Key::AutocastCPU, Key::AutocastCUDA, Key::AutogradCPU, Key::AutogradCUDA, Key::CPU, Key::CUDA}) {
      layers::put_in_front_of<InFront>(kOperators[i].name, kOperators[i].overload, key, kOperators[i].places);
    }
  }
}

}  // namespace ds::model_compression
