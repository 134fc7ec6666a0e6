// Scopes around parameters. Init builds a model that fits on no single rank, GatheredParameters shows sharded
// parameters in full (both named as in deepspeed.zero), and FrozenScope keeps a model out of another one's gradients.
//
//   const auto job = engine::init_distributed();
//   zero::Init init(job.ranks, {.device = job.device});
//   Gpt model(config);                            // any constructor; parameters are sliced while it runs
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .init = &init, .distributed = job});
//
// While an Init lives, the operators of this thread are watched. A tensor that an operator made and that then requires
// a gradient without a graph is a parameter. Parameters beyond a limit are sharded: each rank keeps an even part of
// rank 0's values. An operator that reads one (an initialization of the whole model, say) gets the full values first.
//
// Init and GatheredParameters belong to the thread that made them and throw CommError where ranks take different ways.
// No scope owns the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "dsengine/comm.h"

namespace ds::zero {

// Options of Init, equal on every rank.
struct InitOptions {
  int64_t max_live = 64 << 20;   // elements of parameters that may be unsharded at a time, beside those being read
  int64_t smallest = 64 << 10;   // elements; smaller parameters are not sharded
  at::Device device = at::kCPU;  // where the ranks' communicator takes tensors, and where shards are kept
};

// Shards the parameters of a model while it is built. Every rank runs the same constructors on the thread that made
// this object, so that the collectives in them agree. initialize() ends it, and takes the parameters over one bucket
// after the other; where it is destroyed before, sharded parameters have no elements. With one rank nothing is watched.
//
// Parameters are changed through operators (any of LibTorch's), not through their pointers: what lies between two
// operators is not seen.
class Init {
 public:
  // Collective: throws UsageError when the ranks' options differ.
  explicit Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options = {});
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

  // The communicator it was given.
  const std::shared_ptr<comm::Communicator>& ranks() const;
  // Throws again what a collective or the lack of memory threw in the middle of an operator; nothing has been sharded
  // since, and parameters that could not be gathered hold NaN.
  void rethrow();
  // Writes the part of a parameter that this rank is to have to `part`, flat, and zeros behind the parameter's end,
  // where the parts of the ranks follow one another: no rank has the full parameter meanwhile. Collective. Returns
  // false, and writes nothing, where the parameter is not sharded.
  bool read_part(const at::Tensor& parameter, const at::Tensor& part);
  // Drops what this object keeps of the parameter, because the parameter gets memory of its own.
  void forget(const at::Tensor& parameter);
  // Ends the scope: no tensor made from now on becomes a parameter. Nothing is watched any more, unless parameters of
  // another model are still sharded.
  void end();
  // The elements of parameters that are unsharded now, and the most there have been at a time.
  int64_t live_elements() const;
  int64_t peak_elements() const;
  // The bytes of shards on this rank.
  int64_t held_bytes() const;

 private:
  class Parameters;
  std::unique_ptr<Parameters> parameters_;
};

// Full parameters for as long as a scope lasts, to read them or to change them, at every stage.
//
//   { auto whole = engine->gathered_parameters({model->wte->weight}, /*modifier_rank=*/0); ... }
//
// Made by Engine::gathered_parameters. At stage 3 their buckets are gathered. All ranks open and close the same scopes
// in the same order; forward passes may run inside, engine->step() may not. Without a modifier rank the parameters are
// to be read only: a change is an error when the scope closes, also one through .data(). With a modifier rank, every
// rank has that rank's values afterwards, and the optimizer goes on from them; what other ranks changed is lost.
//
// Other parameters of the same buckets are unsharded as well.
class GatheredParameters {
 public:
  struct Scope;  // the engine's knowledge of the parameters

  // Collective. Everything in `scope` outlives this object. Throws CommError.
  explicit GatheredParameters(Scope scope);
  // Closes the scope, and logs what close() would throw. While an exception unwinds, parameters get the values back
  // that they had: the other ranks may never come to the exchange.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  // Ends the scope; collective with a modifier rank. Throws CommError, and UsageError naming a parameter that was
  // changed without a modifier rank.
  void close();

 private:
  class Opened;
  std::unique_ptr<Opened> opened_;
};

}  // namespace ds::zero

namespace ds::engine {

// Keeps a model out of the gradients of another one's loss while it lives.
//
//   {
//     const auto frozen = ds::engine::frozen_scope(discriminator);
//     generator_engine->backward(bce(discriminator->forward(generator->forward(z)), ones));
//   }
//
// Without it the discriminator's gradients are computed too, as in torch, and have to be dropped by zero_grad().
class FrozenScope {
 public:
  // Turns requires_grad off for those parameters that have it on; the destructor turns it on again for them.
  explicit FrozenScope(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.requires_grad()) continue;
      parameter.set_requires_grad(false);
      frozen_.push_back(parameter);
    }
  }
  ~FrozenScope() {
    for (const at::Tensor& parameter : frozen_) parameter.set_requires_grad(true);
  }
  FrozenScope(const FrozenScope&) = delete;
  FrozenScope& operator=(const FrozenScope&) = delete;

 private:
  std::vector<at::Tensor> frozen_;
};

// Freezes all parameters of `model`, a module holder or a pointer to a module, until the result is destroyed. The graph
// is made inside of the scope; backward() may come later.
template <class Model>
[[nodiscard]] FrozenScope frozen_scope(const Model& model) {
  return FrozenScope(model->parameters());
}

}  // namespace ds::engine
