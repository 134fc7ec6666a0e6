#include "exported/interpreter.h"

#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/shown_text.h"
#include "core/without_stack.h"

namespace ds::exported {
namespace {

// The state of a thread inside a `with torch.autocast(device, dtype, enabled, cache)` block of Python.
class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, at::ScalarType dtype, bool enabled, bool cache)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        was_cached_(at::autocast::is_autocast_cache_enabled()),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_cache_enabled(was_cached_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  bool was_cached_;
  at::ScalarType dtype_before_;
};

using Values = std::vector<c10::IValue>;

class Interpreter {
 public:
  Interpreter(const Program& program, bool training, at::Device device)
      : program_(program), training_(training), device_(device) {}

  Values run_graph(const Graph& graph, Values inputs) const {
    Values slots(graph.slots);
    for (size_t i = 0; i < graph.inputs.size(); ++i) {
      if (graph.inputs[i] >= 0) slots[static_cast<size_t>(graph.inputs[i])] = std::move(inputs[i]);
    }
    inputs.clear();
    torch::jit::Stack stack;
    stack.reserve(kUsualArguments);
    for (const Node& node : graph.nodes) {
      call(node, slots, stack);
      store(node, stack, slots);
      for (const int slot : node.last_uses) slots[static_cast<size_t>(slot)] = c10::IValue();
    }
    Values outputs;
    for (const Argument& output : graph.outputs) outputs.push_back(value_of(output, slots));
    return outputs;
  }

 private:
  static constexpr size_t kUsualArguments = 16;

  // Puts the value of a node's argument on the stack. What nobody reads after it is moved there, for copies count.
  void push(const Argument& argument, Values& slots, torch::jit::Stack& stack) const {
    if (argument.empties_slot) {
      stack.push_back(std::move(slots[static_cast<size_t>(argument.slots[0])]));
    } else if (argument.kind == Argument::Kind::kSlot) {
      stack.push_back(slots[static_cast<size_t>(argument.slots[0])]);
    } else if (argument.kind == Argument::Kind::kConstant && !argument.in_eval) {
      stack.push_back(argument.constant);
    } else {
      stack.push_back(value_of(argument, slots));
    }
  }

  c10::IValue value_of(const Argument& argument, const Values& slots) const {
    using enum Argument::Kind;
    const auto slot = [&](int index) -> const c10::IValue& { return slots[static_cast<size_t>(index)]; };
    switch (argument.kind) {
      case kConstant:
        return argument.in_eval && !training_ ? *argument.in_eval : argument.constant;
      case kSlot:
        return slot(argument.slots[0]);
      case kWrappedNumber:
        return at::native::wrapped_scalar_tensor(slot(argument.slots[0]).toScalar());
      case kDevice:
        return device_;
      case kTensors:
        return list_of<at::Tensor>(argument, [&](size_t i) { return slot(argument.slots[i]).toTensor(); });
      case kOptionalTensors:
        return list_of<std::optional<at::Tensor>>(argument, [&](size_t i) {
          return argument.slots[i] < 0 ? std::nullopt : std::make_optional(slot(argument.slots[i]).toTensor());
        });
      case kInts:
        return list_of<int64_t>(argument, [&](size_t i) {
          return argument.slots[i] < 0 ? argument.values[i].toInt() : slot(argument.slots[i]).toInt();
        });
      case kFloats:
        return list_of<double>(argument, [&](size_t i) {
          return (argument.slots[i] < 0 ? argument.values[i] : slot(argument.slots[i])).toScalar().toDouble();
        });
      case kGraph:
        break;
    }
    return {};  // a graph is run by the node that has it
  }

  template <class Element, class Make>
  static c10::IValue list_of(const Argument& argument, const Make& make) {
    c10::List<Element> list;
    list.reserve(argument.slots.size());
    for (size_t i = 0; i < argument.slots.size(); ++i) list.push_back(make(i));
    return list;
  }

  // Leaves the results of a node on the empty stack.
  void call(const Node& node, Values& slots, torch::jit::Stack& stack) const {
    try {
      for (const Argument& argument : node.arguments) push(argument, slots, stack);
      // In eval() an in-place addition to BatchNorm's count leaves the count as it is.
      if (node.counts_batches && !training_) {
        stack.resize(1);
      } else if (node.kind == Node::Kind::kOperator) {
        node.op->callBoxed(&stack);
      } else {
        stack = results_of(node, stack);
      }
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const c10::Error& error) {
      fail(node, without_stack(error.what_without_backtrace()));
    } catch (const UsageError& error) {
      fail(node, error.what());
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail(node, error.what());
    }
  }

  // The results of a node that is no operator of the dispatcher's.
  Values results_of(const Node& node, const torch::jit::Stack& stack) const {
    switch (node.kind) {
      case Node::Kind::kNumbers:
        return {node.function(stack)};
      case Node::Kind::kSetGrad: {
        const c10::AutoGradMode mode(stack.at(0).toBool());
        return run_inner(node, 1, stack, 2);
      }
      case Node::Kind::kAutocast: {
        const at::ScalarType dtype =
            stack.at(1).isNone() ? at::autocast::get_autocast_dtype(device_.type()) : stack.at(1).toScalarType();
        const AutocastScope scope(device_.type(), dtype, stack.at(2).toBool(),
                                  stack.at(3).isNone() || stack.at(3).toBool());
        return run_inner(node, 4, stack, 5);
      }
      case Node::Kind::kCond: {
        const bool yes = stack.at(0).isTensor() ? stack.at(0).toTensor().item().toBool() : stack.at(0).toBool();
        return run_inner(node, yes ? 1 : 2, stack, 3);
      }
      case Node::Kind::kOperator:
        break;
    }
    ensure(false, "an operator is called through the dispatcher");
    return {};
  }

  // Runs the graph that is argument `graph` with the arguments from `first` on, lists of them opened.
  Values run_inner(const Node& node, size_t graph, const torch::jit::Stack& stack, size_t first) const {
    Values given;
    for (size_t i = first; i < stack.size(); ++i) {
      if (stack[i].isTensorList()) {
        for (const at::Tensor& tensor : stack[i].toTensorVector()) given.emplace_back(tensor);
      } else {
        given.push_back(stack[i]);
      }
    }
    const Graph& inner = program_.graphs[node.arguments[graph].graph];
    require(given.size() == inner.inputs.size(), "expected ", inner.inputs.size(), " inputs of its graph, found ",
            given.size());
    return run_graph(inner, std::move(given));
  }

  void store(const Node& node, torch::jit::Stack& stack, Values& slots) const {
    if (node.has_list_output && stack.size() == 1 && stack[0].isTensorList()) {
      const c10::IValue list = std::move(stack[0]);
      const c10::ArrayRef<c10::IValue> elements = list.toListRef();
      stack.assign(elements.begin(), elements.end());
    }
    if (stack.size() < node.outputs.size()) {
      fail(node, cat("gave ", stack.size(), " results, the file has ", node.outputs.size(), " names for them"));
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] >= 0) slots[static_cast<size_t>(node.outputs[i])] = std::move(stack[i]);
    }
    stack.clear();
  }

  [[noreturn]] void fail(const Node& node, const std::string& what) const {
    // An inner graph's node has said it already.
    if (what.starts_with(program_.path)) throw UsageError(what);
    throw UsageError(cat(program_.path, ": ", node_in_words(node), ": ", what, line_in_python(node)));
  }

  const Program& program_;
  bool training_;
  at::Device device_;
};

// The tensor whose device and dtype constants follow: the first floating-point parameter, else the first tensor that
// the module has registered; null: there is none.
const at::Tensor* leading_tensor(const Program& program) {
  using enum LiftedTensor::Kind;
  const at::Tensor* registered = nullptr;
  for (const LiftedTensor& lifted : program.lifted) {
    if (lifted.kind == kParameter && lifted.value.is_floating_point()) return &lifted.value;
    if (registered == nullptr && (lifted.kind == kParameter || lifted.kind == kBuffer)) registered = &lifted.value;
  }
  return registered;
}

at::Device device_of(const Program& program, const Values& inputs) {
  if (const at::Tensor* const leading = leading_tensor(program)) return leading->device();
  for (const c10::IValue& input : inputs) {
    if (input.isTensor()) return input.toTensor().device();
  }
  return at::kCPU;
}

// Moves what is not registered in the module to where the model runs, as Module::to() moves parameters.
void follow_parameters(Program& program, at::Device device) {
  const at::Tensor* const leading = leading_tensor(program);
  const at::NoGradGuard no_grad;
  for (LiftedTensor& lifted : program.lifted) {
    using enum LiftedTensor::Kind;
    if (lifted.kind == kParameter || lifted.kind == kBuffer) continue;
    // Python's Module.to(dtype) casts buffers, and no other tensors.
    const bool casts = leading != nullptr && leading->is_floating_point() && lifted.kind == kNonPersistent &&
                       lifted.value.scalar_type() == program.dtype;
    const at::ScalarType dtype = casts ? leading->scalar_type() : lifted.value.scalar_type();
    if (lifted.value.device() == device && lifted.value.scalar_type() == dtype) continue;
    lifted.value.set_data(lifted.value.to(device, dtype));
  }
}

}  // namespace

std::string node_in_words(const Node& node) {
  return cat("node \"", node.name, "\" (", node.target,
             node.module.empty() ? "" : cat(", in module \"", node.module, "\""), ")");
}

std::string line_in_python(const Node& node) {
  return node.source.empty() ? std::string() : cat("\nin Python: ", node.source);
}

std::string first_reader(const Program& program, const std::vector<std::string>& names) {
  std::set<int> slots;
  for (size_t i = 0; i < program.sources.size(); ++i) {
    const InputSource& source = program.sources[i];
    if (!source.is_lifted || program.main().inputs[i] < 0) continue;
    const std::string& name = program.lifted[source.index].name;
    if (std::find(names.begin(), names.end(), name) != names.end()) slots.insert(program.main().inputs[i]);
  }
  for (const Node& node : program.main().nodes) {
    for (const Argument& argument : node.arguments) {
      const bool reads =
          std::any_of(argument.slots.begin(), argument.slots.end(), [&](int slot) { return slots.contains(slot); });
      if (!reads) continue;
      return cat(node.target, node.module.empty() ? "" : cat(" in module \"", node.module, "\""),
                 node.source.empty() ? "" : cat(", in Python: ", node.source));
    }
  }
  return {};
}

std::vector<c10::IValue> run(Program& program, const std::vector<c10::IValue>& inputs, bool training) {
  const at::Device device = device_of(program, inputs);
  follow_parameters(program, device);
  const auto source = [&](const InputSource& from) -> c10::IValue {
    return from.is_lifted ? c10::IValue(program.lifted[from.index].value) : inputs[from.index];
  };
  Values all;
  all.reserve(program.sources.size());
  for (const InputSource& from : program.sources) {
    all.push_back(source(from));
    // Autograd may save what the graph reads, and what is written after the run would change under it.
    if (from.is_written) all.back() = all.back().toTensor().clone();
  }
  Values outputs = Interpreter(program, training, device).run_graph(program.main(), std::move(all));
  for (const Mutation& mutation : program.mutations) {
    const at::NoGradGuard no_grad;
    source(mutation.target).toTensor().copy_(outputs[mutation.output].toTensor());
  }
  Values result;
  for (const size_t i : program.user_outputs) result.push_back(std::move(outputs[i]));
  return result;
}

}  // namespace ds::exported
