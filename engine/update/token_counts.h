// The counts that backward_mean() was given in the running accumulation: of tokens, nodes or labels.
//
// Note [Means over counts]
// The gradient of a step of backward_mean() is that of the sum of all losses over C, the sum of all counts, over ranks
// and micro-batches. C is known after the last micro-batch. So backward starts from loss / unit, gradients add up as
// they do for any loss, and what is reduced is the wanted gradient times C / (unit x ranks) (without the ranks where
// gradients are added and not averaged). Whoever reads gradients divides by that, as by the loss scale:
// ScaledBackward::gradient_scale().
//
//  * `unit` only keeps numbers in the range of 16-bit gradients, beside those of backward(). It is a power of two near
//    the largest count of a rank at the engine's first backward_mean(), times the micro-batches of an update, and the
//    same on all ranks. Divisions by it are exact.
//  * The sum over ranks travels with what step() compares (StepAgreement), so that a step exchanges nothing more. On a
//    GPU it stays there in a late step. Whoever reads gradients before step() exchanges it for itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "model/state/model_state.h"

namespace ds::engine {

// One per engine, used by the engine's thread. The state outlives it.
class TokenCounts {
 public:
  explicit TokenCounts(const ModelState& state) : state_(state) {}

  // Throws UsageError where the running accumulation has had backward passes of the other kind. `call`: the call to
  // name; `counted`: it gives a count.
  void require_kind(const char* call, bool counted) const;
  // Notes a backward pass without a count.
  void note_mean() { kind_ = Kind::kMeans; }
  // Adds the count of a pass. The first one of the engine chooses the unit: collective over data-parallel ranks.
  void add(double count, int64_t micro_batches_per_update);

  // Whether the running accumulation has counts, and their sum on this rank.
  bool used() const { return kind_ == Kind::kCounts; }
  double own() const { return own_; }
  // What backward() divides the loss by.
  double unit() const { return unit_; }

  // Returns what reduced gradients are to be divided by; 1 without counts. Collective where the sum over ranks is not
  // known.
  double divisor();
  // Returns the same on the device, float64 [1], from the sum there.
  at::Tensor divisor_on_device(const at::Tensor& total) const;
  bool total_is_known() const { return total_.has_value(); }
  // Takes the sum over ranks, where it is not known yet.
  void take_total(double total) {
    if (!total_) total_ = total;
  }
  // The accumulation is over, or dropped.
  void forget();

 private:
  enum class Kind { kNone, kMeans, kCounts };
  double gradients_unit() const;

  const ModelState& state_;
  Kind kind_ = Kind::kNone;
  double own_ = 0;
  double unit_ = 0;              // 0: not chosen
  std::optional<double> total_;  // over ranks
};

}  // namespace ds::engine
