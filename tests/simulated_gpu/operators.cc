// Every operator that LibTorch has for the CPU, on tensors of cuda: the kernel of the CPU on the same memory.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "tests/simulated_gpu/hooks.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/tensors.h"

namespace ds::simulated_gpu {
namespace {

// One call: its arguments on the CPU, and what they were.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), count_(schema_.arguments().size()) {
    arguments_.assign(stack->end() - static_cast<int64_t>(count_), stack->end());
    find_device();
    const c10::DeviceGuard guard(device_);
    for (size_t i = 0; i < count_; ++i) {
      const auto* const alias = schema_.arguments()[i].alias_info();
      arguments_[i] = converted(std::move(arguments_[i]), alias != nullptr && alias->isWrite(),
                                schema_.arguments()[i].type()->str() == "Generator?");
    }
  }

  std::vector<c10::IValue> run() {
    const c10::DeviceGuard guard(device_);
    std::vector<c10::IValue> results = std::move(arguments_);
    const std::string name = c10::toString(schema_.operator_name());
    const auto work = [&] { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results); };
    if (makes_views()) {  // without a look at the elements
      work();
      for (c10::IValue& result : results) result = returned(std::move(result), {}, name);
      return results;
    }
    const Point point = run_now(device_, name, accesses_, work);
    give_back_resized();
    // A number that the host gets is one that it has waited for.
    const bool host_waits = std::any_of(results.begin(), results.end(), [](const c10::IValue& result) {
      return !result.isTensor() && !result.isTensorList();
    });
    for (c10::IValue& result : results) result = returned(std::move(result), point, name);
    if (host_waits) Timeline::instance().wait(point, name);
    return results;
  }

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor cpu;
    void* data;  // where the CPU's had its elements at first
    bool written;
  };

  bool makes_views() const {
    const auto& returns = schema_.returns();
    return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& argument) {
      return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
    });
  }

  void find_device() {
    std::optional<c10::Device> found;
    const auto look = [&](const c10::IValue& value) {
      if (!found && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
        found = value.toTensor().device();
      }
    };
    for (const c10::IValue& argument : arguments_) {
      look(argument);
      if (!argument.isList()) continue;
      for (const c10::IValue& element : argument.toListRef()) look(element);
    }
    device_ = found.value_or(current_device());
  }

  at::Tensor converted(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      // As on a GPU: of the CPU only single values, and indices.
      TORCH_CHECK(tensor.dim() == 0 || schema_.name().find("index") != std::string::npos, schema_.name(),
                  ": Expected all tensors to be on the same device, found ", device_, " and ", tensor.device());
      return tensor;
    }
    TORCH_CHECK(tensor.device() == device_, schema_.name(), ": Expected all tensors to be on the same device, found ",
                device_, " and ", tensor.device());
    // What has no elements may be an out= that gets some.
    const at::Tensor cpu =
        written && tensor.numel() == 0 ? at::empty({0}, tensor.options().device(at::kCPU)) : on_cpu(tensor);
    accesses_.push_back(access_of(tensor, written));
    pairs_.push_back({tensor, cpu, cpu.data_ptr(), written});
    return cpu;
  }

  c10::IValue converted(c10::IValue value, bool written, bool is_generator) {
    if (value.isTensor()) return converted(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(converted(tensor, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(converted(*tensor, written)) : std::nullopt);
      }
      return list;
    }
    if (value.isGenerator()) return numbers_of(value.toGenerator());
    if (value.isNone() && is_generator) return numbers_of(default_generator(device_.index()));
    if (value.isDevice()) return c10::Device(c10::kCPU);
    return value;
  }

  // out= that had another size.
  void give_back_resized() {
    for (Pair& pair : pairs_) {
      if (!pair.written || (pair.cpu.sizes() == pair.device.sizes() && pair.cpu.data_ptr() == pair.data)) continue;
      const at::Tensor fresh = moved(pair.cpu);
      set_place(pair.device, fresh.storage(), fresh.storage_offset(), fresh.sizes(), fresh.strides());
    }
  }

  at::Tensor moved(const at::Tensor& cpu) {
    const at::Tensor there = empty_on_device(cpu.sizes(), cpu.strides(), cpu.scalar_type(), device_);
    on_cpu(there).copy_(cpu);
    return there;
  }

  at::Tensor returned(const at::Tensor& result, const Point& point, const std::string& name) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const Pair& pair : pairs_) {
      if (result.is_same(pair.cpu)) return pair.device;
    }
    for (const Pair& pair : pairs_) {
      if (result.storage().is_alias_of(pair.cpu.storage())) return view_of(pair.device, result);
    }
    const at::Tensor there = moved(result);
    Timeline::instance().add_access(point, name, access_of(there, /*write=*/true));
    return there;
  }

  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& result) {
    const int64_t offset =
        base.storage_offset() * static_cast<int64_t>(base.element_size()) / static_cast<int64_t>(result.element_size());
    return make_view(base, result.dtype(), offset + result.storage_offset(), result.sizes(), result.strides());
  }

  c10::IValue returned(c10::IValue result, const Point& point, const std::string& name) {
    if (result.isTensor()) return returned(result.toTensor(), point, name);
    if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : result.toTensorVector()) list.push_back(returned(tensor, point, name));
      return list;
    }
    return result;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  size_t count_;
  c10::Device device_ = c10::kCUDA;
  std::vector<c10::IValue> arguments_;
  std::vector<Pair> pairs_;
  std::vector<Access> accesses_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<c10::IValue> results = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

}  // namespace
}  // namespace ds::simulated_gpu
