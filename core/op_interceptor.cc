#include "core/op_interceptor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"

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
// autograd instead, which serves several of ours by turns, while the one that called backward() waits. LibTorch carries
// thread-local callbacks there, and nothing else of a thread that we could use: so each thread with interceptors has a
// callback of its own, a place in a table, by which it is found.
struct InterceptorCallback {
  struct Thread {
    Thread() = default;
    ~Thread() { end(*this); }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

    std::vector<OpInterceptor*> active;
    std::atomic<int> watchers = 0;  // the number of active ones with a watcher
    at::CallbackHandle handle = 0;
    bool listed = false;  // has a place and a callback
    size_t place = 0;
    std::atomic<int> depth = 0;           // operators under way, each called by the one before
    std::atomic<uint64_t> outermost = 0;  // begun so far
    std::mutex visit;                     // this thread and one of autograd may run operators at once
    bool visiting = false;
    const at::RecordFunction* function = nullptr;  // while visiting
    size_t argument = 0;                           // likewise: its place
  };
  static constexpr size_t kPlaces = 128;
  static thread_local Thread own;
  static thread_local Thread* visited;  // whose operator this thread looks at
  static thread_local size_t last;      // the place that the last operator of this thread was for; kPlaces: none
  static std::mutex mutex;              // who takes and leaves places
  static std::array<std::atomic<Thread*>, kPlaces> threads;

  static Thread* serving() {
    if (visited != nullptr) return visited;
    if (!own.active.empty()) return &own;
    return last == kPlaces ? nullptr : threads[last].load(std::memory_order_acquire);
  }

  static void enter() {
    const std::lock_guard lock(mutex);
    const auto free =
        std::find_if(threads.begin(), threads.end(), [](const auto& thread) { return thread == nullptr; });
    require(free != threads.end(), "expected at most ", kPlaces,
            " threads of a process to watch operators (ZeRO stages 1 to 3, zero::Init, gathered parameters), ",
            "found one more. Start ranks as processes");
    own.place = static_cast<size_t>(free - threads.begin());
    free->store(&own, std::memory_order_release);
    own.listed = true;
  }

  static void leave(Thread& thread) {
    const std::lock_guard lock(mutex);
    threads[thread.place].store(nullptr, std::memory_order_release);
    thread.listed = false;
  }

  static void end(Thread& thread) {
    for (OpInterceptor* interceptor : thread.active) interceptor->enabled_on_ = nullptr;
    if (thread.listed) leave(thread);
  }

  // Lives as long as the operator.
  struct Running : at::ObserverContext {
    explicit Running(Thread& of) : thread(of) {
      if (thread.depth++ == 0) ++thread.outermost;
    }
    ~Running() override {
      --thread.depth;
      if (thread.watchers == 0 || visited != nullptr) return;
      const std::lock_guard one(thread.visit);
      for (OpInterceptor* interceptor : thread.active) {
        if (interceptor->watcher_ != nullptr) interceptor->watcher_->ends();
      }
    }
    Thread& thread;
  };

  // Ends with what a callback throws too, which LibTorch only logs.
  struct Visit {
    Visit(Thread& of, const at::RecordFunction& function) : thread(of) {
      thread.visiting = true;
      thread.function = &function;
      visited = &thread;
    }
    ~Visit() {
      thread.visiting = false;
      visited = nullptr;
    }
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

  template <size_t kPlace>
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
    Thread* const thread = threads[kPlace].load(std::memory_order_acquire);
    if (thread == nullptr || visited != nullptr) return nullptr;
    last = kPlace;
    return visit_operator(*thread, function);
  }

  static std::unique_ptr<at::ObserverContext> visit_operator(Thread& thread, const at::RecordFunction& function) {
    auto running = std::make_unique<Running>(thread);
    const std::lock_guard one(thread.visit);
    const Visit guard(thread, function);
    thread.argument = 0;
    for (const c10::IValue& input : function.inputs()) {
      visit(thread, input);
      ++thread.argument;
    }
    if (thread.watchers == 0) return running;
    for (OpInterceptor* interceptor : thread.active) {
      if (interceptor->watcher_ != nullptr) interceptor->watcher_->begins(function);
    }
    return running;
  }

  using Callback = std::unique_ptr<at::ObserverContext> (*)(const at::RecordFunction&);
  template <size_t... kPlace>
  static constexpr std::array<Callback, sizeof...(kPlace)> make_callbacks(std::index_sequence<kPlace...>) {
    return {&on_operator<kPlace>...};
  }
  static Callback own_callback() {
    static constexpr auto kCallbacks = make_callbacks(std::make_index_sequence<kPlaces>());
    return kCallbacks[own.place];
  }
};

thread_local InterceptorCallback::Thread InterceptorCallback::own;
thread_local InterceptorCallback::Thread* InterceptorCallback::visited = nullptr;
thread_local size_t InterceptorCallback::last = InterceptorCallback::kPlaces;
std::mutex InterceptorCallback::mutex;
std::array<std::atomic<InterceptorCallback::Thread*>, InterceptorCallback::kPlaces> InterceptorCallback::threads{};

uint64_t OpInterceptor::outermost_operator() {
  const InterceptorCallback::Thread* const thread = InterceptorCallback::serving();
  return thread == nullptr ? 0 : thread->outermost.load(std::memory_order_relaxed);
}

std::string_view OpInterceptor::operator_name() {
  const InterceptorCallback::Thread* const thread = InterceptorCallback::serving();
  return thread == nullptr || !thread->visiting ? std::string_view() : std::string_view(thread->function->name());
}

bool OpInterceptor::changes_tensor() {
  const InterceptorCallback::Thread* const thread = InterceptorCallback::serving();
  if (thread == nullptr || !thread->visiting || thread->argument >= 64) return false;
  return (changed_arguments(*thread->function) >> thread->argument & 1) != 0;
}

OpInterceptor::~OpInterceptor() { disable(); }

void OpInterceptor::enable() {
  if (enabled()) return;
  InterceptorCallback::Thread& thread = InterceptorCallback::own;
  if (!thread.listed) {
    InterceptorCallback::enter();
    thread.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(InterceptorCallback::own_callback())
                                                   .needsInputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
  }
  enabled_on_ = &thread;
  thread.active.push_back(this);
  if (watcher_ != nullptr) ++thread.watchers;
}

void OpInterceptor::disable() {
  if (!enabled()) return;
  auto& thread = *static_cast<InterceptorCallback::Thread*>(std::exchange(enabled_on_, nullptr));
  std::erase(thread.active, this);
  if (watcher_ != nullptr) --thread.watchers;
  // Only a thread itself can take its callback away: until it does, it keeps its place.
  if (!thread.active.empty() || &thread != &InterceptorCallback::own) return;
  at::removeCallback(thread.handle);
  InterceptorCallback::leave(thread);
}

}  // namespace ds
