// Sees every operator's tensors before its kernel runs, on this thread, for any unmodified module.
//
// LibTorch modules have no forward hooks; what every operator call does pass is at::RecordFunction. While an
// interceptor is enabled, its callback gets each input tensor of each operator that the enabling thread calls
// (composite operators and the ones they call alike). Operators that a callback runs itself are not intercepted. Per
// thread, so that ranks may be threads of one process; with the threads on which autograd runs a thread's backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>

namespace at {
struct RecordFunction;
}

namespace ds {

// Is called before and after whole operators, beside the tensors that they read: begin and end nest. An operator that
// was under way when its interceptor was enabled ends without having begun. An exception from a call is logged by
// LibTorch and lost.
class OperatorWatcher {
 public:
  virtual ~OperatorWatcher() = default;
  virtual void begins(const at::RecordFunction& function) = 0;
  virtual void ends() = 0;
};

class OpInterceptor {
 public:
  using BeforeRead = std::function<void(const at::Tensor&)>;

  // `watcher`, which may be null, outlives it.
  explicit OpInterceptor(BeforeRead before_read, OperatorWatcher* watcher = nullptr)
      : before_read_(std::move(before_read)), watcher_(watcher) {}
  ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  // Begins to intercept; idempotent. To be called on the thread that runs the operators. Several interceptors may be
  // enabled on one thread (one for each engine), on up to 128 threads; throws on the next.
  void enable();
  // Ends that. Not to be called from inside the callback; from another thread only while the one that enabled it runs
  // no operators.
  void disable();
  bool enabled() const { return enabled_on_ != nullptr; }
  // Counts the outermost operators that this thread has begun while interceptors were enabled: inside the callback, the
  // number of the one that is running, whatever operators it calls.
  static uint64_t outermost_operator();
  // Inside the callback, the name of the operator, "aten::linear"; empty outside.
  static std::string_view operator_name();
  // Whether, inside the callback, the operator's schema says that it changes the elements of the tensor at hand.
  static bool changes_tensor();

 private:
  friend struct InterceptorCallback;
  BeforeRead before_read_;
  OperatorWatcher* watcher_;
  void* enabled_on_ = nullptr;  // the record of the thread
};

}  // namespace ds
