// The counts of tokens, nodes or labels that backward_mean() has got in the running accumulation.
//
// Note [Means over counts]
// The gradient of a step of backward_mean() is that of the sum of all losses over C, the sum of all counts, over ranks
// and micro-batches. C is known after the last micro-batch. So backward starts from loss / unit, gradients add up as
// they do for any loss, and the reduced gradient is the wanted one times the divisor C / (unit x ranks), or C / unit
// where gradients are added and not averaged. Code that reads gradients divides by it, as by the loss scale:
// ScaledBackward::gradient_scale(). Where C is 0 the gradient is that of the sum.
//
//  * `unit` only keeps the values in the range of 16-bit gradients. It is the smallest power of two that is not below
//    the largest count of a rank at the engine's first backward_mean(), times the micro-batches of an update, and it is
//    the same on all ranks. Divisions by it are exact.
//  * The sum over ranks travels with what step() compares (StepAgreement), so that a step exchanges nothing more. On a
//    GPU the sum stays on the device in a late step. A call that reads gradients before step() makes an all-reduce of
//    its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "model/state/model_state.h"

namespace ds::engine {

// The counts of one rank and their sum over ranks. One per engine, used by the engine's thread. The state outlives it.
class TokenCounts {
 public:
  explicit TokenCounts(const ModelState& state) : state_(state) {}

  // Throws UsageError where the running accumulation has had backward passes of the other kind. `call`: the call to
  // name in the message. `counted`: whether that call gives a count.
  void require_kind(const char* call, bool counted) const;
  // Notes a backward pass without a count.
  void note_mean() { kind_ = Kind::kMeans; }
  // Adds the count of a pass, 0 or more; the sum over ranks is then unknown. The engine's first call chooses the unit,
  // and is collective over data-parallel ranks.
  void add(double count, int64_t micro_batches_per_update);

  // Whether the running accumulation has counts.
  bool used() const { return kind_ == Kind::kCounts; }
  // The sum of the counts of this rank in the running accumulation.
  double own() const { return own_; }
  // The number that backward_mean() divides the sum of losses by; 0 before the engine's first add().
  double unit() const { return unit_; }

  // Returns the number that reduced gradients are to be divided by; 1 without counts. Collective over data-parallel
  // ranks where the sum over ranks is not known.
  double divisor();
  // Returns the same number as a float64 tensor [1] on the device. `total`: the sum over ranks, such a tensor.
  at::Tensor divisor_on_device(const at::Tensor& total) const;
  // Whether there are counts whose sum over ranks the host does not know.
  bool wants_total() const { return used() && !total_; }
  // Sets the sum over ranks.
  void take_total(double total) { total_ = total; }
  // Forgets all counts. To be called when the accumulation is over or dropped.
  void forget();

 private:
  enum class Kind { kNone, kMeans, kCounts };
  double gradients_unit() const;

  const ModelState& state_;
  Kind kind_ = Kind::kNone;
  double own_ = 0;
  double unit_ = 0;              // 0: not chosen
  std::optional<double> total_;  // the sum over data-parallel ranks; empty: not known
};

}  // namespace ds::engine
