// Named spans of the library's own in the traces of LibTorch's profiler (dsengine/trace.h): phases of the engine,
// collectives, gathered and released buckets, actions of a pipeline.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <utility>

namespace ds {

// A span on the calling thread, from its making to its end. `make_name()` returns its name, and is called only where
// somebody records spans of users; elsewhere a TraceSpan is a look at two lists of callbacks, some nanoseconds.
class TraceSpan {
 public:
  template <class MakeName>
  explicit TraceSpan(const MakeName& make_name) {
    const at::RecordFunctionGuard recorded(/*is_enabled=*/true);  // also where operators are not intercepted
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    name_ = make_name();
    function_.emplace(std::move(*callbacks));
    function_->before(name_.c_str());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  std::string name_;  // which `function_` refers to
  std::optional<at::RecordFunction> function_;
};

}  // namespace ds
