// The layers of a pipeline module: how to build each, and how to call it. Names and meaning follow
// deepspeed.pipe.LayerSpec and TiedLayerSpec.
//
//   std::vector<LayerSpec> layers;
//   layers.push_back(LayerSpec::tied<Embedding>("wte", vocab, hidden));
//   for (int i = 0; i < depth; ++i) layers.push_back(LayerSpec::of<Block>(config).named("h." + std::to_string(i)));
//   layers.push_back(LayerSpec::tied_with<Embedding>(
//       "wte", [](EmbeddingImpl& wte, const at::Tensor& x) { return at::linear(x, wte.weight); }, vocab, hidden));
//
// A layer takes one to eight tensors, or all as Tensors, and returns a tensor, a tuple or a vector of tensors: what the
// next layer takes. A LayerSpec is a value that owns copies of what it was given; it is called on the engine's thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace ds::pipeline {

using Tensors = std::vector<at::Tensor>;

namespace internal {

// "gpt::Block" for gpt::BlockImpl.
std::string type_name(const std::type_info& type);
[[noreturn]] void throw_arity(size_t found);

// A tensor, Tensors, or a tuple or pair of these.
template <class Value>
void append(Tensors& out, const Value& value) {
  if constexpr (std::is_convertible_v<const Value&, const at::Tensor&>) {
    out.push_back(value);
  } else if constexpr (std::is_same_v<Value, Tensors>) {
    out.insert(out.end(), value.begin(), value.end());
  } else {
    std::apply([&](const auto&... part) { (append(out, part), ...); }, value);
  }
}

template <size_t>
using TensorArgument = const at::Tensor&;

template <class Fn, size_t... I>
constexpr bool takes(std::index_sequence<I...> /*count*/) {
  return std::is_invocable_v<const Fn&, TensorArgument<I>...>;
}

template <class Fn, size_t kCount>
bool call_if(const Fn& fn, const Tensors& inputs, Tensors& outputs) {
  if constexpr (takes<Fn>(std::make_index_sequence<kCount>())) {
    if (inputs.size() != kCount) return false;
    [&]<size_t... I>(std::index_sequence<I...>) { append(outputs, fn(inputs[I]...)); }
    (std::make_index_sequence<kCount>());
    return true;
  } else {
    return false;
  }
}

template <class Fn, size_t... kLess>
constexpr bool takes_any(std::index_sequence<kLess...> /*counts less one*/) {
  return (takes<Fn>(std::make_index_sequence<kLess + 1>()) || ...);
}

template <class Fn, size_t... kLess>
bool call_one(std::index_sequence<kLess...> /*counts less one*/, const Fn& fn, const Tensors& inputs,
              Tensors& outputs) {
  return (call_if<Fn, kLess + 1>(fn, inputs, outputs) || ...);
}

// Calls fn with as many tensors as there are, or with all as one argument where it takes that.
template <class Fn>
Tensors call(const Fn& fn, const Tensors& inputs) {
  using Counts = std::make_index_sequence<8>;
  Tensors outputs;
  if constexpr (std::is_invocable_v<const Fn&, const Tensors&>) {
    append(outputs, fn(inputs));
  } else {
    static_assert(takes_any<Fn>(Counts()), "a layer takes one to eight tensors, or Tensors");
    if (!call_one(Counts(), fn, inputs, outputs)) throw_arity(inputs.size());
  }
  return outputs;
}

// module.forward as a function.
template <class Module>
struct ForwardOf {
  Module& module;
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) const -> decltype(module.forward(std::forward<Inputs>(inputs)...)) {
    return module.forward(std::forward<Inputs>(inputs)...);
  }
};

// A function of a module and tensors, as one of tensors.
template <class Module, class Function>
struct Bound {
  Module& module;
  const Function& function;
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) const -> decltype(function(module, std::forward<Inputs>(inputs)...)) {
    return function(module, std::forward<Inputs>(inputs)...);
  }
};

// The class that a module holder (torch::nn::Linear) holds, or the class itself.
template <class Module>
struct Held {
  using type = Module;
};
template <class Module>
requires requires { typename Module::ContainedType; }
struct Held<Module> {
  using type = typename Module::ContainedType;
};

}  // namespace internal

// One layer: its name, how it is built, and how it is called.
class LayerSpec {
 public:
  // A module, by class or holder, that is built from copies of the arguments on the ranks of its stage only.
  template <class Module, class... Arguments>
  static LayerSpec of(Arguments... arguments) {  // NOLINT(performance-unnecessary-value-param): it keeps the copies
    using Impl = typename internal::Held<Module>::type;
    return LayerSpec(
        internal::type_name(typeid(Impl)), [=] { return std::make_shared<Impl>(arguments...); }, &call_forward<Impl>);
  }
  // A module that shares its weights with the other layers of the same key: they start equal, and their gradients are
  // added. Layers of one key are of one class with the same arguments; their parameters bear the key as name.
  template <class Module, class... Arguments>
  static LayerSpec tied(std::string key, Arguments... arguments) {
    LayerSpec spec = of<Module>(std::move(arguments)...);
    spec.name = spec.key = std::move(key);
    return spec;
  }
  // A tied module that is called by a function (Impl&, tensors...) in place of its forward.
  template <class Module, class Forward, class... Arguments>
  static LayerSpec tied_with(std::string key, Forward forward, Arguments... arguments) {
    using Impl = typename internal::Held<Module>::type;
    LayerSpec spec = tied<Module>(std::move(key), std::move(arguments)...);
    spec.call = call_function<Impl>(std::move(forward));
    return spec;
  }
  // A module that is there already, on every rank; only its stage uses it. A holder or a shared pointer. Layers of one
  // module, or of modules that share weights, are tied: give them one key (tied_by).
  template <class Module>
  static LayerSpec module(const Module& holder) {
    if constexpr (requires { typename Module::ContainedType; }) {
      return module(holder.ptr());
    } else {
      using Impl = typename Module::element_type;
      LayerSpec spec(
          internal::type_name(typeid(Impl)), [holder] { return holder; }, &call_forward<Impl>);
      spec.given = holder;
      return spec;
    }
  }
  // A module that `factory` builds, on the ranks of its stage only; called by its forward, or by `function`
  // (Impl&, tensors...).
  template <class Factory>
  static LayerSpec made_by(Factory factory) {
    using Impl = typename std::invoke_result_t<Factory&>::element_type;
    return LayerSpec(internal::type_name(typeid(Impl)), std::move(factory), &call_forward<Impl>);
  }
  template <class Factory, class Function>
  static LayerSpec made_by(Factory factory, Function function) {
    using Impl = typename std::invoke_result_t<Factory&>::element_type;
    return LayerSpec(internal::type_name(typeid(Impl)), std::move(factory), call_function<Impl>(std::move(function)));
  }
  // A function without weights.
  template <class Function>
  static LayerSpec function(Function function) {
    return LayerSpec(
        "function", [] { return nullptr; },
        [function](torch::nn::Module* /*none*/, const Tensors& inputs) { return internal::call(function, inputs); });
  }

  // The name of its parameters, with dots for submodules ("h.3"), so that checkpoints fit those of the same model as
  // one module; by default the layer's number.
  LayerSpec named(std::string text) && {
    name = std::move(text);
    return std::move(*this);
  }

  // Shares its weights with the other layers of this key, as tied() does.
  LayerSpec tied_by(std::string text) && {
    name = key = std::move(text);
    return std::move(*this);
  }

  std::string name;                                           // empty: the layer's number
  std::string type;                                           // for partition "type:REGEX" and messages
  std::string key;                                            // the tie of tied layers; else empty
  std::shared_ptr<torch::nn::Module> given;                   // module(): the module that build returns; else null
  std::function<std::shared_ptr<torch::nn::Module>()> build;  // returns null for functions
  std::function<Tensors(torch::nn::Module*, const Tensors&)> call;

 private:
  LayerSpec(std::string kind, decltype(build) builder, decltype(call) caller)
      : type(std::move(kind)), build(std::move(builder)), call(std::move(caller)) {}

  template <class Impl, class Function>
  static auto call_function(Function function) {
    return [function](torch::nn::Module* module, const Tensors& inputs) {
      const internal::Bound<Impl, Function> bound{dynamic_cast<Impl&>(*module), function};
      return internal::call(bound, inputs);
    };
  }

  template <class Impl>
  static Tensors call_forward(torch::nn::Module* module, const Tensors& inputs) {
    const internal::ForwardOf<Impl> forward{dynamic_cast<Impl&>(*module)};
    return internal::call(forward, inputs);
  }
};

}  // namespace ds::pipeline
