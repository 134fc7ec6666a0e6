// Models whose parameters are in parts on the ranks: building one that fits on no rank (Init), and seeing parameters
// whole (GatheredParameters). The names are those of deepspeed.zero.
//
//   const auto job = engine::init_distributed();
//   zero::Init init(job.ranks, {.device = job.device});
//   Gpt model(config);                            // any constructor; parameters are sliced while it runs
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .init = &init, .distributed = job});
//
// While an Init lives, the operators of this thread are watched. A tensor that an operator made and that then requires
// a gradient without a graph is a parameter. Parameters beyond a limit are kept as slices: rank 0's values, one even
// part on each rank; an operator that reads one (an initialization of the whole model, say) gets it whole again first.
//
// Both belong to the thread that made them and throw CommError where ranks part. Neither owns the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "dsengine/comm.h"

namespace ds::zero {

// The same on every rank.
struct InitOptions {
  int64_t max_live = 64 << 20;   // elements of parameters that may be whole at a time, beside what an operator reads
  int64_t smallest = 64 << 10;   // elements; smaller parameters stay whole
  at::Device device = at::kCPU;  // where the ranks' communicator takes tensors, and where slices are kept
};

// Every rank runs the same constructors on the thread that made this object, so that the collectives in them agree.
// Ends with initialize(), which takes the parameters over one bucket after the other; destroyed before, sliced
// parameters have no elements. Nothing is watched with one rank.
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

  // What it was given.
  const std::shared_ptr<comm::Communicator>& ranks() const;
  // Throws what a collective or the lack of memory threw in the middle of an operator; nothing has been sliced since,
  // and parameters that could not be gathered hold NaN.
  void rethrow();
  // The parameter gets memory of its own: what this object keeps of it is dropped.
  void forget(const at::Tensor& parameter);
  // No tensor made from now on becomes a parameter; nothing is watched any more, unless parameters of another model are
  // still sliced.
  void end();
  // Elements of parameters that are whole now, and most of all times.
  int64_t live_elements() const;
  int64_t peak_elements() const;
  // Bytes of slices on this rank.
  int64_t held_bytes() const;

 private:
  class Parameters;
  std::unique_ptr<Parameters> parameters_;
};

// Whole parameters for as long as a scope lasts, to read them or to change them, at every stage.
//
//   { auto whole = engine->gathered_parameters({model->wte->weight}, /*modifier_rank=*/0); ... }
//
// Made by Engine::gathered_parameters. At stage 3 their buckets are gathered. All ranks open and close the same scopes
// in the same order; forward passes may run inside, engine->step() may not. Without a modifier rank the parameters are
// to be read only: a change is an error when the scope closes, also one through .data(). With one, every rank has that
// rank's values afterwards, and the optimizer goes on from them; what other ranks changed is lost.
//
// Other parameters of the same buckets are whole as well.
class GatheredParameters {
 public:
  struct Scope;  // what the engine knows of the parameters

  // Collective. Everything in `scope` outlives this object. Throws CommError.
  explicit GatheredParameters(Scope scope);
  // close(), but what it throws is logged. While an exception unwinds, parameters get the values back that they had:
  // the other ranks may never come to the exchange.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  // Ends the scope. With a modifier rank collective. Throws UsageError naming a parameter that was changed without one,
  // CommError.
  void close();

 private:
  class Opened;
  std::unique_ptr<Opened> opened_;
};

}  // namespace ds::zero
