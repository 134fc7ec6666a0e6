#include "zero/op_interceptor.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace ds::zero {

// The enabled interceptors of this thread, and the one callback that serves them.
struct InterceptorCallback {
  static thread_local std::vector<OpInterceptor*> active;
  static thread_local at::CallbackHandle handle;

  static void visit(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.has_storage()) return;
      for (OpInterceptor* interceptor : active) interceptor->before_read_(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) visit(element);
    }
  }

  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
    if (active.empty()) return nullptr;
    for (const c10::IValue& input : function.inputs()) visit(input);
    return nullptr;
  }
};

thread_local std::vector<OpInterceptor*> InterceptorCallback::active;
thread_local at::CallbackHandle InterceptorCallback::handle = 0;

OpInterceptor::~OpInterceptor() { disable(); }

void OpInterceptor::enable() {
  if (enabled_) return;
  enabled_ = true;
  InterceptorCallback::active.push_back(this);
  if (InterceptorCallback::active.size() > 1) return;
  InterceptorCallback::handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&InterceptorCallback::on_operator)
                                                               .needsInputs(true)
                                                               .scopes({at::RecordScope::FUNCTION}));
}

void OpInterceptor::disable() {
  if (!enabled_) return;
  enabled_ = false;
  std::erase(InterceptorCallback::active, this);
  if (InterceptorCallback::active.empty()) at::removeCallback(InterceptorCallback::handle);
}

}  // namespace ds::zero
