#include "zero/op_interceptor.h"

#include "core/check.h"

namespace ds::zero {

struct InterceptorCallback {
  static thread_local OpInterceptor* active;

  static void visit(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.has_storage()) active->before_read_(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) visit(element);
    }
  }

  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
    if (active == nullptr) return nullptr;
    for (const c10::IValue& input : function.inputs()) visit(input);
    return nullptr;
  }
};

thread_local OpInterceptor* InterceptorCallback::active = nullptr;

OpInterceptor::~OpInterceptor() { disable(); }

void OpInterceptor::enable() {
  if (handle_) return;
  require(
      InterceptorCallback::active == nullptr,
      "two engines want to intercept operators of one thread; expected one engine per thread while its parameters are ",
      "on their way. Call synchronize_parameters() of the first engine before using the second");
  InterceptorCallback::active = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&InterceptorCallback::on_operator)
                                           .needsInputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

void OpInterceptor::disable() {
  if (!handle_) return;
  at::removeCallback(*handle_);
  handle_.reset();
  if (InterceptorCallback::active == this) InterceptorCallback::active = nullptr;
}

}  // namespace ds::zero
