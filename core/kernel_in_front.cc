#include "core/kernel_in_front.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>
#include <vector>

namespace ds {
namespace {

// torch says it where a kernel takes the place of another one; here it is meant.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

// Never destroyed: the dispatcher may be used until the process ends.
struct Registrations {
  std::mutex mutex;
  std::vector<c10::RegistrationHandleRAII> handles;

  static Registrations& of_process() {
    [[gnu::used]] static auto* const kRegistrations = new Registrations;
    return *kRegistrations;
  }
};

}  // namespace

std::optional<c10::SafeKernelFunction> kernel_at(const c10::OperatorHandle& op, c10::DispatchKey key) {
  if (!op.hasComputedKernelForDispatchKey(key)) return std::nullopt;
  // Autocast lets some pass.
  if (c10::autocast_dispatch_keyset.has(key) && !op.hasKernelForDispatchKey(key)) return std::nullopt;
  return op.getComputedKernelForDispatchKey(key);
}

void put_in_front(const c10::OperatorHandle& op, c10::DispatchKey key, c10::BoxedKernel kernel) {
  Registrations& registrations = Registrations::of_process();
  const std::lock_guard lock(registrations.mutex);
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  registrations.handles.push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, c10::KernelFunction::makeFromBoxedKernel(std::move(kernel)),
      /*cpp_signature=*/std::nullopt, /*inferred_function_schema=*/nullptr, "dsengine, in front"));
}

}  // namespace ds
