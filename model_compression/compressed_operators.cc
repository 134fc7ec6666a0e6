// Operators of compressed layers: ours change the operands and hand them to the kernel that was there before, at the
// key where the operator comes in.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/transposed.h"
#include "model_compression/compressed_model.h"

namespace ds::model_compression {
namespace {

// How an operator has a layer's weight. torch::nn's Linear is no linear: it is addmm with the weight transposed, or
// matmul, and add_ of the bias.
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

// What was registered before, by schema and key. Entries stay where they are: operators of other threads hold them
// while another model registers its own.
class Originals {
 public:
  struct Entry {
    Places places;
    c10::SafeKernelFunction kernel;
  };
  void add(const c10::FunctionSchema* schema, Key key, Entry entry) {
    const std::unique_lock lock(mutex_);
    entries_.emplace(std::pair(schema, key), std::move(entry));
  }
  const Entry& of(const c10::FunctionSchema* schema, Key key) {
    const std::shared_lock lock(mutex_);
    return entries_.at({schema, key});
  }
  static Originals& of_process() {
    // Never destroyed: the dispatcher may be used until the process ends.
    [[gnu::used]] static auto* const kOriginals = new Originals;
    return *kOriginals;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<const c10::FunctionSchema*, Key>, Entry> entries_;
};

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

// Of layers whose bias changes, what they computed last on this thread: add_ of the bias is theirs on that alone, and
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
  const at::Tensor tensor = given.toTensor();
  // Meta: shapes alone.
  if (!tensor.defined() || tensor.is_meta()) return {};
  return places.role == Role::kTransposed ? base_of_transposed(tensor) : tensor;
}

void compress_operands(const Places& places, CompressedLayer& layer, const at::Tensor& weight, c10::IValue* arguments) {
  // Operators inside compute in the dtypes that they are given.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  if (places.input) arguments[*places.input] = layer.compressed_input(arguments[*places.input].toTensor());
  if (places.weight) {
    const at::Tensor compressed = layer.compressed_weight(weight);
    arguments[*places.weight] = places.role == Role::kTransposed ? compressed.t() : compressed;
  }
  if (!places.bias || !layer.changes_bias() || !arguments[*places.bias].isTensor()) return;
  // addmm adds what it is given, a residual perhaps.
  const at::Tensor bias = arguments[*places.bias].toTensor();
  const auto module = layer.module();
  if (bias.defined() && module && bias_of(*module).is_same(bias)) {
    arguments[*places.bias] = layer.compressed_bias(bias);
  }
}

template <Key kKey>
void compute(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema* const schema = &op.schema();
  const Originals::Entry& entry = Originals::of_process().of(schema, kKey);
  const c10::SafeKernelFunction& original = entry.kernel;
  if (is_inside()) return original.callBoxed(op, keys, stack);
  const Places& places = entry.places;
  c10::IValue* const arguments = stack->data() + (stack->size() - schema->arguments().size());
  const at::Tensor tensor = tensor_of_layer(places, arguments);
  std::shared_ptr<CompressedLayer> layer;
  if (tensor.defined()) {
    layer = places.role == Role::kAddedBias ? find_layer_of_bias(tensor) : find_layer(tensor, places.kind);
  }
  if (layer && places.role == Role::kAddedBias && !adds_to_product(*layer, arguments)) layer = nullptr;
  if (!layer || !layer->module()) return original.callBoxed(op, keys, stack);
  const Inside inside;
  compress_operands(places, *layer, tensor, arguments);
  original.callBoxed(op, keys, stack);
  note_product(places, *layer, stack->back());
}

// torch says it where a kernel takes the place of another one; here it is meant.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

template <Key kKey>
void put_before(const Intercepted& one, std::vector<torch::Library>& libraries) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(one.name, one.overload);
  if (!op.hasComputedKernelForDispatchKey(kKey)) return;
  // Autocast lets some pass.
  if (c10::autocast_dispatch_keyset.has(kKey) && !op.hasKernelForDispatchKey(kKey)) return;
  Originals::of_process().add(&op.schema(), kKey,
                              {.places = one.places, .kernel = op.getComputedKernelForDispatchKey(kKey)});
  const std::string name = std::string(one.name).substr(6) + (*one.overload ? std::string(".") + one.overload : "");
  torch::Library& library = libraries.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute<kKey>>());
}

// add_ is everywhere, and of a layer only where that changes its bias.
bool is_needed(const Intercepted& one, const std::vector<std::shared_ptr<CompressedLayer>>& layers) {
  return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
    return layer->kind() == one.places.kind && (one.places.role != Role::kAddedBias || layer->changes_bias());
  });
}

}  // namespace

void register_operators_of(const std::vector<std::shared_ptr<CompressedLayer>>& layers) {
  struct Registrations {
    std::mutex mutex;
    std::array<bool, kOperators.size()> done = {};
    std::vector<torch::Library> libraries;
  };
  [[gnu::used]] static auto* const kRegistrations = new Registrations;
  const std::lock_guard lock(kRegistrations->mutex);
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (size_t i = 0; i < kOperators.size(); ++i) {
    if (kRegistrations->done[i] || !is_needed(kOperators[i], layers)) continue;
    kRegistrations->done[i] = true;
    // From above: what comes in at one key passes those below as it is.
    put_before<Key::AutocastCPU>(kOperators[i], kRegistrations->libraries);
    put_before<Key::AutocastCUDA>(kOperators[i], kRegistrations->libraries);
    put_before<Key::AutogradCPU>(kOperators[i], kRegistrations->libraries);
    put_before<Key::AutogradCUDA>(kOperators[i], kRegistrations->libraries);
    put_before<Key::CPU>(kOperators[i], kRegistrations->libraries);
    put_before<Key::CUDA>(kOperators[i], kRegistrations->libraries);
  }
}

}  // namespace ds::model_compression
