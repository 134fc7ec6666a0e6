#include "zero/op_interceptor.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace ds::zero {

// The enabled interceptors of this thread, and the one callback that serves them.
struct InterceptorCallback {
  static thread_local std::vector<OpInterceptor*> active;
  static thread_local at::CallbackHandle handle;
  static thread_local int depth;  // operators under way, each called by the one before
  static thread_local uint64_t outermost;
  static thread_local bool visiting;

  // Lives as long as the operator.
  struct Running : at::ObserverContext {
    Running() {
      if (depth++ == 0) ++outermost;
    }
    ~Running() override { --depth; }
  };

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
    if (active.empty() || visiting) return nullptr;
    auto running = std::make_unique<Running>();
    visiting = true;
    for (const c10::IValue& input : function.inputs()) visit(input);
    visiting = false;
    return running;
  }
};

thread_local std::vector<OpInterceptor*> InterceptorCallback::active;
thread_local at::CallbackHandle InterceptorCallback::handle = 0;
thread_local int InterceptorCallback::depth = 0;
thread_local uint64_t InterceptorCallback::outermost = 0;
thread_local bool InterceptorCallback::visiting = false;

uint64_t OpInterceptor::outermost_operator() { return InterceptorCallback::outermost; }

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
