#include "recompute/modules/module_watch.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/replay/memory_writes.h"
#include "core/replay/own_results.h"
#include "core/split/split_tensor.h"
#include "core/torch_version/node.h"
#include "recompute/modules/operator_log.h"
#include "recompute/modules/saved_tensor.h"

namespace ds::recompute {

namespace autograd = torch::autograd;

namespace {

// A chosen module's way with operators.
struct Choice {
  std::string name;
  ModuleCheckpointOptions options;
  std::unordered_map<const OperatorFacts*, bool> drops;
  std::optional<std::weak_ptr<const void>> owner;  // none: it holds as long as the modules live

  bool is_over() const { return owner && owner->expired(); }
  bool may_drop(const OperatorFacts& facts) {
    const auto [entry, is_new] = drops.try_emplace(&facts, false);
    if (is_new) {
      entry->second = facts.replayable && (options.recompute == Recompute::kEverything || facts.pointwise) &&
                      !(options.keep && options.keep(facts.name.substr(0, facts.name.find('.'))));
    }
    return entry->second;
  }
};

struct KnownParameter {
  c10::weak_intrusive_ptr<at::TensorImpl> parameter;  // whose address stays taken
  std::shared_ptr<Choice> choice;
};

struct Watch {
  std::unordered_map<const at::TensorImpl*, KnownParameter> parameters;
  std::shared_ptr<Choice> region;  // null: none runs
  std::unique_ptr<OperatorLog> log;
  // Leaves that the region reads beside parameters of its own: what it computes on.
  std::unordered_map<const at::TensorImpl*, c10::weak_intrusive_ptr<at::TensorImpl>> inputs;
  std::vector<std::shared_ptr<SavedTensor>> undecided;  // of the operator that runs
  int inside = 0;                                       // composed operators under way
  bool at_operator = false;                             // one that is recorded runs
  uint64_t seen = 0;
  ModuleCheckpointStatistics statistics;

  static Watch& current() {
    thread_local Watch watch;
    return watch;
  }

  void end() {
    if (!region) return;
    decide();
    region.reset();
    log.reset();
    inputs.clear();
  }
  void begin(std::shared_ptr<Choice> choice) {
    end();
    region = std::move(choice);
    log = std::make_unique<OperatorLog>();
    ++statistics.regions;
  }
  void decide() {
    const auto saved = std::exchange(undecided, {});
    for (const auto& each : saved) decide(*each);
  }
  void decide(SavedTensor& saved) {
    const int64_t bytes = saved.decide(*log);
    ++(bytes > 0 ? statistics.dropped_tensors : statistics.kept_tensors);
    statistics.dropped_bytes += bytes;
  }
};

struct SavedTensorHooks : autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& tensor) override {
    Watch& watch = Watch::current();
    saved = std::make_shared<SavedTensor>(tensor);
    if (!watch.region) return;
    if (watch.at_operator) {
      watch.undecided.push_back(saved);
    } else {
      watch.decide(*saved);
    }
  }
  at::Tensor call_unpack_hook() override { return saved->unpack(); }

  std::shared_ptr<SavedTensor> saved;
};

// In front of LibTorch's engine, which runs all passes.
class WatchedEngine : public autograd::Engine {
 public:
  ~WatchedEngine() override { stop(); }

  static autograd::Engine& instance() {
    // Used until the process ends.
    static auto* const kEngine = new WatchedEngine;
    return *kEngine;
  }
  // NOLINTNEXTLINE(readability-function-size): the engine's signature
  autograd::variable_list execute(const autograd::edge_list& roots, const autograd::variable_list& inputs,
                                  bool keep_graph, bool create_graph, bool accumulate_grad,
                                  const autograd::edge_list& outputs) override {
    Watch::current().end();
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<autograd::GraphTask>& task,
                                                                 NodePointer<> root,
                                                                 autograd::InputBuffer&& inputs) override {
    Watch::current().end();
    return get_base_engine().execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return get_base_engine().make_anomaly_metadata();
  }
  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return Watch::current().region ? std::make_unique<SavedTensorHooks>() : nullptr;
  }
};

template <class Visit>
void each_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Visit&& visit) {
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isTensor()) break;
        visit(element.toTensor());
      }
    }
  }
}

// Modules, and owners on other threads, end without a word: a thread without any is watched no more.
void forget_ended(Watch& watch) {
  std::erase_if(watch.parameters,
                [](const auto& known) { return known.second.parameter.expired() || known.second.choice->is_over(); });
  if (!watch.parameters.empty()) return;
  watch.end();
  c10::impl::tls_set_dispatch_key_included(kWatchKey, false);
}

// An operator of the program, not one that another calls: whose is it?
void find_region(Watch& watch, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  constexpr uint64_t kLookEvery = 4096;
  if (++watch.seen % kLookEvery == 0) forget_ended(watch);
  if (watch.parameters.empty() || autograd::get_current_graph_task_id() != -1) return;
  if (watch.region && watch.region->is_over()) watch.end();
  std::shared_ptr<Choice> found;
  std::vector<at::Tensor> others;
  each_argument(op, stack, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto known = watch.parameters.find(tensor.unsafeGetTensorImpl());
    if (known != watch.parameters.end() && !known->second.choice->is_over()) {
      if (!found || known->second.choice == watch.region) found = known->second.choice;
    } else if (tensor.requires_grad() && tensor.is_leaf()) {
      others.push_back(tensor);
    }
  });
  if (found) {
    if (found != watch.region) watch.begin(std::move(found));
    for (const at::Tensor& leaf : others) {
      watch.inputs.try_emplace(leaf.unsafeGetTensorImpl(),
                               c10::weak_intrusive_ptr<at::TensorImpl>(leaf.getIntrusivePtr()));
    }
  } else if (std::any_of(others.begin(), others.end(),
                         [&](const at::Tensor& leaf) { return !watch.inputs.contains(leaf.unsafeGetTensorImpl()); })) {
    watch.end();
  }
}

struct OperatorScope {
  explicit OperatorScope(Watch& of) : watch(of) { watch.at_operator = true; }
  ~OperatorScope() {
    watch.at_operator = false;
    watch.undecided.clear();  // of one that threw: they are kept
  }
  Watch& watch;
};

void run_recorded(Watch& watch, const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const OperatorFacts& facts = facts_of(op);
  const c10::impl::ExcludeDispatchKeyGuard unseen(kWatchKey);
  const bool records = at::GradMode::is_enabled() && watch.region->may_drop(facts);
  const bool notes = records || !facts.writes.empty() || (facts.makes_blank && at::GradMode::is_enabled());
  OperatorLog::Draft draft;
  if (notes) draft = watch.log->begin(op, facts, *stack, records);
  const OperatorScope scope(watch);
  const uint64_t own = OwnResults::noted();
  op.redispatchBoxed(below, stack);
  // A backward pass inside of the operator has ended the region.
  if (!watch.region) return;
  // Run again it would be LibTorch's: what it gave is kept.
  if (OwnResults::noted() != own) draft.step.reset();
  if (notes) watch.log->end(draft, facts, *stack);
  watch.decide();
}

struct Inside {
  explicit Inside(Watch& of) : watch(of) { ++watch.inside; }
  ~Inside() { --watch.inside; }
  Watch& watch;
};

// What autocast, split tensors and the like are above; below it an operator computes.
bool is_above_autograd(c10::DispatchKey key) {
  return c10::toFunctionalityKey(key) > c10::DispatchKey::AutogradNestedTensor;
}

void see_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWatchKey);
  Watch& watch = Watch::current();
  if (SameValues::in_force()) {
    const c10::impl::ExcludeDispatchKeyGuard unseen(kWatchKey);
    op.redispatchBoxed(below, stack);
    return;
  }
  if (watch.inside == 0 && at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()) {
    find_region(watch, op, *stack);
  }
  if (!watch.region) {
    const c10::impl::ExcludeDispatchKeyGuard unseen(kWatchKey);
    op.redispatchBoxed(below, stack);
    return;
  }
  if (is_above_autograd(below.highestPriorityTypeId()) || facts_of(op).composite) {
    const Inside inside(watch);
    op.redispatchBoxed(below, stack);
    return;
  }
  run_recorded(watch, op, below, stack);
}

void see_memory_write(const at::Tensor& tensor) {
  Watch& watch = Watch::current();
  if (!watch.region) return;
  const c10::impl::ExcludeDispatchKeyGuard unseen(kWatchKey);
  watch.log->before_unseen_write(tensor);
}

// Never destroyed: the dispatcher may be used until the process ends. Kept where leak checkers find it.
void register_watch() {
  [[gnu::used]] static const auto* const kRegistration = [] {
    auto* const library = new torch::Library(torch::Library::IMPL, "_", kWatchKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&see_operator>());
    at::SavedTensorDefaultHooks::lazy_initialize();
    observe_memory_writes(&see_memory_write);
    autograd::set_default_engine_stub(&WatchedEngine::instance);
    return library;
  }();
}

}  // namespace

void require_watchable() {
  require(
      autograd::get_current_graph_task_id() == -1,
      "apply_activation_checkpointing: expected a call outside of backward passes, found one inside of a hook or an ",
      "autograd function's backward; call it before training");
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  autograd::Engine* const engine = &autograd::Engine::get_default_engine();
  require(
      engine == &autograd::Engine::get_base_engine() || dynamic_cast<WatchedEngine*>(engine) != nullptr,
      "apply_activation_checkpointing: expected LibTorch's own autograd engine, found another (libtorch_python sets ",
      "one), which gives no place for hooks of saved tensors; use recompute::checkpoint in such a process");
  register_watch();
}

void watch_modules(const std::vector<ChosenModule>& modules, const ModuleCheckpointOptions& options,
                   const std::shared_ptr<const void>& owner) {
  Watch& watch = Watch::current();
  watch.end();
  for (const ChosenModule& chosen : modules) {
    const auto choice =
        std::make_shared<Choice>(Choice{.name = chosen.name, .options = options, .drops = {}, .owner = {}});
    if (owner) choice->owner = owner;
    for (const at::Tensor& parameter : chosen.module->parameters()) {
      if (!parameter.defined()) continue;
      watch.parameters.insert_or_assign(
          parameter.unsafeGetTensorImpl(),
          KnownParameter{c10::weak_intrusive_ptr<at::TensorImpl>(parameter.getIntrusivePtr()), choice});
    }
  }
  c10::impl::tls_set_dispatch_key_included(kWatchKey, true);
}

void forget_parameters(const torch::nn::Module& module) {
  Watch& watch = Watch::current();
  watch.end();
  for (const at::Tensor& parameter : module.parameters()) watch.parameters.erase(parameter.unsafeGetTensorImpl());
  if (watch.parameters.empty()) c10::impl::tls_set_dispatch_key_included(kWatchKey, false);
}

ModuleCheckpointStatistics take_watch_statistics() { return std::exchange(Watch::current().statistics, {}); }

}  // namespace ds::recompute
