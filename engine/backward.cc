// The program's backward passes: from a loss, from any tensor and its gradient, and from one loss for several engines.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
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

// Throws UsageError where engines multiply the loss by different numbers: a pass has one factor for all its gradients.
void require_one_sequence_axis(const std::vector<Engine::Impl*>& engines) {
  const int first = engines.front()->state.ranks.sequence_ranks();
  for (const Engine::Impl* const engine : engines) {
    const int own = engine->state.ranks.sequence_ranks();
    require(own == first, "backward(loss, engines): expected one sequence_parallel_size, found ", first, " and ", own,
            " (of ", engine->state.module->name(), "); give the configs one value");
  }
}

// Throws UsageError where they divide it by different numbers.
void require_one_accumulation(const std::vector<Engine::Impl*>& engines) {
  const int64_t first = engines.front()->order.micro_batches.per_update();
  for (const Engine::Impl* const engine : engines) {
    const int64_t own = engine->order.micro_batches.per_update();
    require(own == first, "backward(loss, engines): expected one gradient_accumulation_steps, by which the loss is ",
            "divided, found ", first, " and ", own, " (of ", engine->state.module->name(),
            "); give the configs one value, or divide the loss yourself and pass scale_wrt_gas = false");
  }
}

// Gives all engines of a pass one loss scale, the smallest, which dynamic ones follow.
void agree_on_loss_scale(const std::vector<Engine::Impl*>& engines) {
  double smallest = engines.front()->scaled_backward->loss_scale();
  for (const Engine::Impl* const engine : engines) smallest = std::min(smallest, engine->scaled_backward->loss_scale());
  for (Engine::Impl* const engine : engines) {
    const double own = engine->scaled_backward->loss_scale();
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

// Tells the ranks of a tensor axis, when it is destroyed, that what they look at next belongs to another micro-batch.
struct NextBatch {
  TensorParts* parts;
  explicit NextBatch(TensorParts* of) : parts(of) {}
  ~NextBatch() {
    if (parts) parts->next_batch();
  }
  NextBatch(const NextBatch&) = delete;
  NextBatch& operator=(const NextBatch&) = delete;
};

// The stages of a backward pass of one engine, in their order; of several engines, each stage runs for all of them.

// `counted`: the pass gives a count.
void require_backward(Engine::Impl& engine, bool counted = false) {
  engine.order.require(Call::kBackward);
  engine.scaled_backward->counts().require_kind(counted ? "backward_mean()" : "backward()", counted);
  engine.state.gradients.reducer->neighbours().require_no_gradients("backward()");
  engine.shown->require_untouched("backward()");
  engine.update->settle(Update::Next::kBackward);
  engine.watch->look("backward()");
  require(engine.state.ranks.sequence_ranks() == 1 || engine.shared_batches.noted(),
          "backward(): sequence_parallel_size is ", engine.state.ranks.sequence_ranks(), ": expected a batch that was ",
          "cut by ", engine.cuts_sequences ? "SequenceParallel::shard()" : "engine->forward(model, inputs...)",
          ", found that none was: the ranks that share a batch would each train on all of it");
}

// Returns `loss` times ScaledBackward::addend_factor().
at::Tensor whole_gradient(const Engine::Impl& engine, const at::Tensor& loss) {
  const double factor = engine.scaled_backward->addend_factor();
  return factor == 1.0 ? loss : loss * factor;
}

// `loss`: undefined where it is not known; with a count the sum, which is divided by no number of micro-batches.
void begin_backward(Engine::Impl& engine, const at::Tensor& loss, bool scale_wrt_gas,
                    std::optional<double> count = std::nullopt) {
  const MicroBatchCounter& counter = engine.order.micro_batches;
  // Each rank has the whole loss of a batch that the engine has cut, and an addend of one that the program has cut.
  const int sharing = engine.state.ranks.sequence_ranks();
  const bool whole = !engine.cuts_sequences;
  if (count) {
    engine.scaled_backward->counts().add(whole ? *count / sharing : *count, counter.per_update());
  } else {
    engine.scaled_backward->counts().note_mean();
  }
  engine.reporter->backward_begins();
  engine.divides_loss = scale_wrt_gas;
  if (engine.parity) engine.parity->note_loss(loss);
  const int64_t micro_batch = counter.done();
  engine.batches.begin(micro_batch, engine.loader.get());
  double share = scale_wrt_gas ? 1.0 / static_cast<double>(counter.per_update()) : 1.0;
  if (count && whole) share /= sharing;
  if (!count && !whole) share *= sharing;  // the loss of a step is a mean over data ranks
  if (loss.defined()) {
    engine.batches.keep_loss(micro_batch, loss.detach(), share);
  } else {
    engine.batches.lose_loss();
  }
  engine.scaled_backward->begin_micro_batch(micro_batch);
  engine.step->note_gradient_change(engine.shown->take_back());
}

void run_backward(Engine::Impl& engine, const std::function<void()>& pass) {
  const MicroBatchCounter& counter = engine.order.micro_batches;
  // It acts after a pass that throws, too; not before the pass, for what that computes again is of this micro-batch.
  const NextBatch next{engine.state.tensor.get()};
  engine.scaled_backward->run(counter.boundary_is_known() && counter.at_boundary(), pass);
}

void end_backward(Engine::Impl& engine) {
  using After = ShownGradients::After;
  MicroBatchCounter& counter = engine.order.micro_batches;
  const ModelState& state = engine.state;
  const bool synchronizes = engine.order.scopes.synchronizes();
  const bool reduced = counter.boundary_is_known() && counter.at_boundary() && synchronizes;
  if (state.ranks.groups.buffers && synchronizes) broadcast_buffers(*state.module, *state.ranks.groups.buffers);
  engine.replicas->note_backward(synchronizes);
  counter.note_backward();
  const After pass = reduced ? After::kLastGradient : counter.at_boundary() ? After::kUnreduced : After::kPart;
  const char* const factor = engine.scaled_backward->counts().used()
                                 ? "step() divides it by the counts of backward_mean()"
                             : engine.scaled_backward->scales_loss() ? "the loss scale of fp16 is still in it"
                                                                     : nullptr;
  engine.shown->show(pass, factor);
  engine.reporter->backward_ends();
}

at::Tensor backward_of_loss(Engine::Impl& engine, const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  engine.order.require_driver(Call::kBackward);
  require_loss(loss);
  require_backward(engine);
  const Phases::Scope phase(engine.phases, "backward");
  const Autocast::Pause pause(engine.state.ranks.device.type());
  begin_backward(engine, loss, scale_wrt_gas);
  const at::Tensor averaged = scale_wrt_gas ? engine.scaled_backward->averaged(loss) : loss;
  const at::Tensor scaled = engine.scaled_backward->scaled(whole_gradient(engine, averaged));
  run_backward(engine, [&] { scaled.backward({}, retain_graph); });
  end_backward(engine);
  return averaged.detach();
}

at::Tensor backward_of_sum(Engine::Impl& engine, const at::Tensor& sum, double count, bool retain_graph) {
  require(!engine.state.plan.pipeline, "backward_mean(): the model is a pipeline, whose train_batch() averages over ",
          "micro-batches: expected a model in one stage. In a pipeline, give micro-batches of equal counts, or divide ",
          "the sum by a constant in the loss function");
  engine.order.require_driver(Call::kBackward);
  require(sum.defined() && sum.numel() == 1, "backward_mean(): expected a scalar, the sum of the losses of all tokens ",
          "(or nodes, or labels) of this micro-batch, found ", describe(sum), "; reduce it with loss.sum()");
  require_graph(sum, "sum");
  require(std::isfinite(count) && count >= 0, "backward_mean(): count: expected the number of tokens that are in the ",
          "sum, 0 or more, found ", count);
  require(!(engine.state.gradients.reduction && engine.state.plan.error_feedback),
          "backward_mean(): the compression of ",
          "gradients keeps errors from step to step (error_feedback), whose weight would follow the counts: expected ",
          "error_feedback off, or backward() with the mean");
  require_backward(engine, /*counted=*/true);
  const Phases::Scope phase(engine.phases, "backward_mean");
  const Autocast::Pause pause(engine.state.ranks.device.type());
  begin_backward(engine, sum, /*scale_wrt_gas=*/false, count);
  const at::Tensor scaled = engine.scaled_backward->scaled(sum / engine.scaled_backward->counts().unit());
  run_backward(engine, [&] { scaled.backward({}, retain_graph); });
  end_backward(engine);
  return sum.detach() / (count > 0 ? count : 1.0);
}

void backward_of_tensor(Engine::Impl& engine, const at::Tensor& out, const at::Tensor& gradient, bool retain_graph,
                        bool scale_wrt_gas) {
  engine.order.require_driver(Call::kBackward);
  require(out.defined() && gradient.defined() && out.sizes() == gradient.sizes(),
          "backward(out, gradient): expected a gradient of the shape of out, found ", describe(out), " and ",
          describe(gradient));
  require(out.dim() > 0 && gradient.is_floating_point(),
          "backward(out, gradient): expected a tensor that is no scalar ", "and a floating-point gradient, found ",
          describe(out), " and ", describe(gradient),
          "; a mean over a count is backward_mean(sum, count), and a scalar is multiplied by its factor: ",
          "backward(loss * factor)");
  require_graph(out, "tensor");
  require_backward(engine);
  const Phases::Scope phase(engine.phases, "backward");
  const Autocast::Pause pause(engine.state.ranks.device.type());
  begin_backward(engine, {}, scale_wrt_gas);
  const at::Tensor averaged = scale_wrt_gas ? engine.scaled_backward->averaged(out) : out;
  const at::Tensor scaled = engine.scaled_backward->scaled(whole_gradient(engine, averaged));
  const at::Tensor seed = gradient.detach().to(scaled.options());
  run_backward(engine, [&] { scaled.backward(seed, retain_graph); });
  end_backward(engine);
}

}  // namespace

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  return impl_->named([&] { return backward_of_loss(*impl_, loss, retain_graph, scale_wrt_gas); });
}

at::Tensor Engine::backward_mean(const at::Tensor& sum, double count, bool retain_graph) {
  return impl_->named([&] { return backward_of_sum(*impl_, sum, count, retain_graph); });
}

void Engine::backward(const at::Tensor& out, const at::Tensor& gradient, bool retain_graph, bool scale_wrt_gas) {
  impl_->named([&] { backward_of_tensor(*impl_, out, gradient, retain_graph, scale_wrt_gas); });
}

at::Tensor backward(const at::Tensor& loss, const std::vector<std::shared_ptr<Engine>>& engines, bool retain_graph,
                    bool scale_wrt_gas) {
  require_engines(engines);
  std::vector<Engine::Impl*> impls;
  for (const auto& engine : engines) impls.push_back(&EngineAccess::impl_of(*engine));
  for (const Engine::Impl* const impl : impls) impl->order.require_driver(Call::kBackward);
  require_loss(loss);
  for (Engine::Impl* const impl : impls) impl->named([&] { require_backward(*impl); });
  require_one_sequence_axis(impls);
  if (scale_wrt_gas) require_one_accumulation(impls);
  agree_on_loss_scale(impls);
  const Phases::Scope phase(impls.front()->phases, "backward");
  const Autocast::Pause pause(impls.front()->state.ranks.device.type());
  for (Engine::Impl* const impl : impls) begin_backward(*impl, loss, scale_wrt_gas);
  const ScaledBackward& first = *impls.front()->scaled_backward;
  const at::Tensor averaged = scale_wrt_gas ? first.averaged(loss) : loss;
  const at::Tensor scaled = first.scaled(whole_gradient(*impls.front(), averaged));
  std::function<void()> pass = [&] { scaled.backward({}, retain_graph); };
  for (Engine::Impl* const impl : impls) {  // the first one's ends first
    // Which bucket of which engine is complete first may differ between ranks.
    pass = [impl, inner = std::move(pass)] {
      impl->state.gradients.reducer->reduce_after_next_pass();
      run_backward(*impl, inner);
    };
  }
  pass();
  for (Engine::Impl* const impl : impls) end_backward(*impl);
  return averaged.detach();
}

}  // namespace ds::engine
