// The moving average of the weights in the hands of the program: dsengine/ema.h.
#include "dsengine/ema.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <exception>
#include <functional>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "engine/engine_impl.h"
#include "model/state/whole_state.h"

namespace ds::engine {
namespace {

// Returns the insides of an engine that keeps an average. `call`: the call to name.
Engine::Impl& averaging_impl(const std::shared_ptr<Engine>& engine, const char* call) {
  require(engine != nullptr, call, ": expected an engine, found none");
  Engine::Impl& impl = EngineAccess::impl_of(*engine);
  require(impl.state.average != nullptr, call, ": expected an engine that keeps a moving average of the weights, ",
          "found one without; pass .ema = {.decay = 0.999} to initialize()");
  return impl;
}

// Puts values into this rank's part of each bucket, and gives them to the parameters. `waits`: until all have arrived.
void show(Engine::Impl& impl, const std::function<at::Tensor(size_t bucket)>& values, bool waits) {
  ModelState& state = impl.state;
  zero::ParameterAccess& access = *state.access;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    state.buckets[b].kept_slice().use(/*changes=*/true, [&] { state.own_part(b).copy_(values(b)); });
  }
  for (size_t b = 0; b < state.buckets.size(); ++b) access.updated(b);
  access.end_update();
  if (waits) access.wait_all();
  at::autocast::clear_cache();  // casted copies of the weights before
}

}  // namespace

EmaScope::EmaScope(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
  const at::NoGradGuard no_grad;
  Engine::Impl& impl = averaging_impl(engine_, "EmaScope");
  ModelState& state = impl.state;
  impl.named([&] { impl.order.require(Call::kEmaScope); });
  const Phases::Scope phase(impl.phases, "EmaScope");
  impl.synchronize_judged();
  impl.saves.background().wait_copied();  // where masters are the parameters' own slices
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    state.buckets[b].kept_slice().use(/*changes=*/false, [&] { own_.push_back(state.own_part(b).clone()); });
  }
  impl.order.scopes.begin_ema();
  try {
    const auto averages = [&](size_t b) { return state.average->values(b); };
    show(impl, averages, /*waits=*/true);
    // Not before: while parameters are gathered, a change of their versions counts as one of the program's.
    impl.watch->average_shown(true);
  } catch (...) {  // no destructor follows
    restore();
    throw;
  }
}

EmaScope::~EmaScope() { restore(); }

void EmaScope::restore() noexcept {
  const at::NoGradGuard no_grad;
  Engine::Impl& impl = EngineAccess::impl_of(*engine_);
  if (!impl.process.is_this()) return;  // Note [Forked children]
  const Phases::Scope phase(impl.phases, "end of an EmaScope");
  ModelState& state = impl.state;
  const auto attempt = [&](const auto& action) {
    try {
      action();
    } catch (const std::exception& error) {
      log::error("EmaScope: ", error.what());
      return false;
    }
    return true;
  };
  attempt([&] { impl.watch->look("the end of an EmaScope"); });  // throws for what the program has changed
  attempt([&] { state.access->take_changed(); });                // else slices would take it over later
  const bool restored = attempt([&] {
    require(impl.order.scopes.gathers() == 0,
            "a scope of gathered_parameters() that began in it is still open: expected ",
            "its end before that of the EmaScope. Load a checkpoint to go on");
    const auto own = [&](size_t b) { return own_[b]; };
    show(impl, own, /*waits=*/std::uncaught_exceptions() == 0);  // else other ranks may never come
  });
  impl.order.scopes.end_ema();
  impl.watch->average_shown(false);
  if (!restored) impl.order.consistency.slice_updated();  // calls say so until a checkpoint is loaded
}

StateDict ema_state_dict(const std::shared_ptr<Engine>& engine) {
  const at::NoGradGuard no_grad;
  Engine::Impl& impl = averaging_impl(engine, "ema_state_dict()");
  impl.named([&] { impl.order.require(Call::kEmaStateDict); });
  const Phases::Scope phase(impl.phases, "ema_state_dict");
  impl.synchronize();
  return whole_averages(impl.state);
}

int64_t ema_updates(const std::shared_ptr<Engine>& engine) {
  Engine::Impl& impl = averaging_impl(engine, "ema_updates()");
  impl.step->late().read();
  return impl.state.average->updates();
}

}  // namespace ds::engine
