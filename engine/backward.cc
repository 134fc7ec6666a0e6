// The program's backward passes: from a loss, from any tensor and its gradient, and from one loss for several engines.
#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/shared_buffers.h"

namespace ds::engine {
namespace {

void require_graph(const at::Tensor& root, const char* what) {
  require(root.requires_grad(), "backward: the ", what, " has no graph: expected a tensor computed from trainable ",
          "parameters, found ", describe(root),
          " that does not require a gradient (computed under NoGradGuard, or all parameters frozen?)");
}

void require_loss(const at::Tensor& loss) {
  require(loss.defined() && loss.numel() == 1, "backward: expected a scalar loss, found ", describe(loss),
          "; reduce it first, for example with loss.mean(), or pass its gradient: backward(out, gradient)");
  require_graph(loss, "loss");
}

void require_engines(const std::vector<std::shared_ptr<Engine>>& engines) {
  require(!engines.empty(), "backward(loss, engines): expected the engines whose models the loss runs through, found ",
          "none");
  for (size_t i = 0; i < engines.size(); ++i) {
    require(engines[i] != nullptr, "backward(loss, engines): engine ", i, " of the list is null");
    require(std::find(engines.begin(), engines.begin() + static_cast<std::ptrdiff_t>(i), engines[i]) ==
                engines.begin() + static_cast<std::ptrdiff_t>(i),
            "backward(loss, engines): expected each engine once, found engine ", i, " of the list twice");
  }
}

// The factor of one pass is that of all gradients it makes.
void require_one_accumulation(const std::vector<Engine::Impl*>& engines) {
  const int64_t first = engines.front()->order.micro_batches.per_update();
  for (const Engine::Impl* const engine : engines) {
    const int64_t own = engine->order.micro_batches.per_update();
    require(own == first, "backward(loss, engines): expected one gradient_accumulation_steps, by which the loss is ",
            "divided, found ", first, " and ", own, " (of ", engine->state.module->name(),
            "); give the configs one value, or divide the loss yourself and pass scale_wrt_gas = false");
  }
}

// Likewise of loss scales: dynamic ones follow the smallest.
void agree_on_loss_scale(const std::vector<Engine::Impl*>& engines) {
  double smallest = engines.front()->accumulation->loss_scale();
  for (const Engine::Impl* const engine : engines) smallest = std::min(smallest, engine->accumulation->loss_scale());
  for (Engine::Impl* const engine : engines) {
    const double own = engine->accumulation->loss_scale();
    if (own == smallest) continue;
    require(engine->loss_scaler && engine->loss_scaler->dynamic() && engine->order.micro_batches.at_start(),
            "backward(loss, engines): expected one loss scale, found ", own, " (of ", engine->state.module->name(),
            ", which cannot change it ", engine->order.micro_batches.at_start() ? "" : "inside an accumulation",
            ") and ", smallest, "; give the fp16 sections of the configs the same values");
    // The scaler may not have heard yet of a step that leaves its scale as it is, and could change the lowered one.
    engine->step->late().read();
    engine->loss_scaler->lower_to(smallest);
    engine->state.fp8->gradients_scaled(smallest / own);
  }
}

// What ranks of a tensor axis look at next belongs to another micro-batch.
struct NextBatch {
  TensorParts* parts;
  explicit NextBatch(TensorParts* of) : parts(of) {}
  ~NextBatch() {
    if (parts) parts->next_batch();
  }
  NextBatch(const NextBatch&) = delete;
  NextBatch& operator=(const NextBatch&) = delete;
};

}  // namespace

void Engine::Impl::require_backward() {
  order.require(Call::kBackward);
  state.gradients.reducer->require_own_gradients("backward()");
  shown->require_untouched("backward()");
  update->settle(Update::Next::kBackward);
  watch->look("backward()");
}

void Engine::Impl::begin_backward(const at::Tensor& loss, bool scale_wrt_gas) {
  reporter->backward_begins();
  const int64_t micro_batch = order.micro_batches.done();
  batches.begin(micro_batch, loader.get());
  const double share = scale_wrt_gas ? 1.0 / static_cast<double>(order.micro_batches.per_update()) : 1.0;
  if (loss.defined()) {
    batches.keep_loss(micro_batch, loss.detach(), share);
  } else {
    batches.lose_loss();
  }
  accumulation->begin_micro_batch(micro_batch);
  step->note_gradient_change(shown->take_back());
}

void Engine::Impl::run_backward(const std::function<void()>& pass) {
  // Also after one that throws. Not before it: what is computed again in it belongs to the same micro-batch.
  const NextBatch next{state.tensor.get()};
  accumulation->run(order.micro_batches.boundary_is_known() && order.micro_batches.at_boundary(), pass);
}

void Engine::Impl::end_backward() {
  using After = ShownGradients::After;
  const bool reduced =
      order.micro_batches.boundary_is_known() && order.micro_batches.at_boundary() && order.scopes.synchronizes();
  if (state.ranks.groups.buffers && order.scopes.synchronizes())
    broadcast_buffers(*state.module, *state.ranks.groups.buffers);
  order.micro_batches.note_backward();
  const After pass = reduced                             ? After::kLastGradient
                     : order.micro_batches.at_boundary() ? After::kUnreduced
                                                         : After::kPart;
  shown->show(pass, accumulation->scales_loss());
  reporter->backward_ends();
}

at::Tensor Engine::Impl::backward_of(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  order.require_driver(Call::kBackward);
  require_loss(loss);
  require_backward();
  const Phases::Scope phase(phases, "backward");
  const Autocast::Pause pause(state.ranks.device.type());
  begin_backward(loss, scale_wrt_gas);
  const at::Tensor averaged = scale_wrt_gas ? accumulation->averaged(loss) : loss;
  const at::Tensor scaled = accumulation->scaled(averaged);
  run_backward([&] { scaled.backward({}, retain_graph); });
  end_backward();
  return averaged.detach();
}

void Engine::Impl::backward_from(const at::Tensor& out, const at::Tensor& gradient, bool retain_graph,
                                 bool scale_wrt_gas) {
  order.require_driver(Call::kBackward);
  require(out.defined() && gradient.defined() && out.sizes() == gradient.sizes(),
          "backward(out, gradient): expected a gradient of the shape of out, found ", describe(out), " and ",
          describe(gradient));
  require_graph(out, "tensor");
  require_backward();
  const Phases::Scope phase(phases, "backward");
  const Autocast::Pause pause(state.ranks.device.type());
  begin_backward({}, scale_wrt_gas);
  const at::Tensor scaled = accumulation->scaled(scale_wrt_gas ? accumulation->averaged(out) : out);
  const at::Tensor seed = gradient.detach().to(scaled.options());
  run_backward([&] { scaled.backward(seed, retain_graph); });
  end_backward();
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  return impl_->named([&] { return impl_->backward_of(loss, retain_graph, scale_wrt_gas); });
}

void Engine::backward(const at::Tensor& out, const at::Tensor& gradient, bool retain_graph, bool scale_wrt_gas) {
  impl_->named([&] { impl_->backward_from(out, gradient, retain_graph, scale_wrt_gas); });
}

at::Tensor backward(const at::Tensor& loss, const std::vector<std::shared_ptr<Engine>>& engines, bool retain_graph,
                    bool scale_wrt_gas) {
  require_engines(engines);
  std::vector<Engine::Impl*> impls;
  for (const auto& engine : engines) impls.push_back(&EngineAccess::impl_of(*engine));
  for (const Engine::Impl* const impl : impls) impl->order.require_driver(Call::kBackward);
  require_loss(loss);
  for (Engine::Impl* const impl : impls) impl->named([&] { impl->require_backward(); });
  if (scale_wrt_gas) require_one_accumulation(impls);
  agree_on_loss_scale(impls);
  const Phases::Scope phase(impls.front()->phases, "backward");
  const Autocast::Pause pause(impls.front()->state.ranks.device.type());
  for (Engine::Impl* const impl : impls) impl->begin_backward(loss, scale_wrt_gas);
  const Accumulation& first = *impls.front()->accumulation;
  const at::Tensor averaged = scale_wrt_gas ? first.averaged(loss) : loss;
  const at::Tensor scaled = first.scaled(averaged);
  std::function<void()> pass = [&] { scaled.backward({}, retain_graph); };
  for (Engine::Impl* const impl : impls) {  // the first one's ends first
    // Which bucket of which engine is complete first may differ between ranks.
    pass = [impl, inner = std::move(pass)] {
      impl->state.gradients.reducer->reduce_after_next_pass();
      impl->run_backward(inner);
    };
  }
  pass();
  for (Engine::Impl* const impl : impls) impl->end_backward();
  return averaged.detach();
}

}  // namespace ds::engine
