#include "core/op_interceptor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace ds {
namespace {

// A bit for each argument that an operator changes elements of.
uint64_t find_changed_arguments(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  const auto handle = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!handle || handle->hasTag(at::Tag::inplace_view)) return 0;
  constexpr std::array<std::string_view, 3> kKeepElements = {"aten::record_stream", "aten::retain_grad",
                                                             "aten::set_data"};
  for (const std::string_view kept : kKeepElements) {
    if (name->name == kept) return 0;
  }
  uint64_t changed = 0;
  const std::vector<c10::Argument>& arguments = handle->schema().arguments();
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) changed |= uint64_t{1} << i;
  }
  return changed;
}

uint64_t changed_arguments(const at::RecordFunction& function) {
  // By the name in the schema, of which each operator has one that stays. What is no operator has a name of its own
  // memory, and none of it is kept.
  thread_local std::unordered_map<const char*, uint64_t> known;
  const auto found = known.find(function.name());
  if (found != known.end()) return found->second;
  const uint64_t changed = find_changed_arguments(function);
  if (function.operator_name()) known.emplace(function.name(), changed);
  return changed;
}

}  // namespace

// Note [Threads of autograd]
// The interceptors of a thread see the operators of that thread. A backward pass on a GPU runs them on a thread of
// autograd instead, while the one that called backward() waits; LibTorch carries thread-local callbacks there, but not
// what this file keeps per thread. So such a thread serves the only thread of the process that has interceptors: ranks
// are processes then. (Ranks that are threads train on the CPU, where backward runs on the thread that called it.)
struct InterceptorCallback {
  struct Thread {
    std::vector<OpInterceptor*> active;
    at::CallbackHandle handle = 0;
    int depth = 0;           // operators under way, each called by the one before
    uint64_t outermost = 0;  // begun so far
    bool visiting = false;
    const at::RecordFunction* function = nullptr;  // while visiting
    size_t argument = 0;                           // likewise: its place
  };
  static thread_local Thread own;
  static std::mutex mutex;              // of `threads`
  static std::vector<Thread*> threads;  // that have interceptors
  static std::atomic<Thread*> only;     // the one of them, if it is one

  static Thread* serving() { return own.active.empty() ? only.load(std::memory_order_acquire) : &own; }

  static void enlist(bool enters) {
    const std::lock_guard lock(mutex);
    enters ? threads.push_back(&own) : static_cast<void>(std::erase(threads, &own));
    only.store(threads.size() == 1 ? threads.front() : nullptr, std::memory_order_release);
  }

  // Lives as long as the operator.
  struct Running : at::ObserverContext {
    explicit Running(Thread& of) : thread(of) {
      if (thread.depth++ == 0) ++thread.outermost;
    }
    ~Running() override { --thread.depth; }
    Thread& thread;
  };

  // Ends with what a callback throws too, which LibTorch only logs.
  struct Visit {
    Visit(Thread& of, const at::RecordFunction& function) : thread(of) {
      thread.visiting = true;
      thread.function = &function;
    }
    ~Visit() { thread.visiting = false; }
    Thread& thread;
  };

  static void visit(const Thread& thread, const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.has_storage()) return;
      for (OpInterceptor* interceptor : thread.active) interceptor->before_read_(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) visit(thread, element);
    }
  }

  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
    Thread* const thread = serving();
    if (thread == nullptr || thread->visiting) return nullptr;
    auto running = std::make_unique<Running>(*thread);
    const Visit guard(*thread, function);
    thread->argument = 0;
    for (const c10::IValue& input : function.inputs()) {
      visit(*thread, input);
      ++thread->argument;
    }
    return running;
  }
};

thread_local InterceptorCallback::Thread InterceptorCallback::own;
std::mutex InterceptorCallback::mutex;
std::vector<InterceptorCallback::Thread*> InterceptorCallback::threads;
std::atomic<InterceptorCallback::Thread*> InterceptorCallback::only = nullptr;

uint64_t OpInterceptor::outermost_operator() {
  const InterceptorCallback::Thread* const thread = InterceptorCallback::serving();
  return thread == nullptr ? 0 : thread->outermost;
}

bool OpInterceptor::changes_tensor() {
  const InterceptorCallback::Thread* const thread = InterceptorCallback::serving();
  if (thread == nullptr || !thread->visiting || thread->argument >= 64) return false;
  return (changed_arguments(*thread->function) >> thread->argument & 1) != 0;
}

OpInterceptor::~OpInterceptor() { disable(); }

void OpInterceptor::enable() {
  if (enabled_) return;
  enabled_ = true;
  InterceptorCallback::Thread& thread = InterceptorCallback::own;
  thread.active.push_back(this);
  if (thread.active.size() > 1) return;
  InterceptorCallback::enlist(/*enters=*/true);
  thread.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&InterceptorCallback::on_operator)
                                                 .needsInputs(true)
                                                 .scopes({at::RecordScope::FUNCTION}));
}

void OpInterceptor::disable() {
  if (!enabled_) return;
  enabled_ = false;
  InterceptorCallback::Thread& thread = InterceptorCallback::own;
  std::erase(thread.active, this);
  if (!thread.active.empty()) return;
  at::removeCallback(thread.handle);
  InterceptorCallback::enlist(/*enters=*/false);
}

}  // namespace ds
