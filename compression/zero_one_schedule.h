// When 0/1 Adam does what (Lu et al., arXiv:2202.06009, policies T_v and T_u with DeepSpeed's keys). A pure function of
// the step. Torch-free.
//
//   until var_freeze_step   the variance is updated, from a dense mean, at steps that `variance_interval` divides; it
//                           doubles after var_update_scaler of them. At other steps gradients are compressed
//   later                   the variance stays; ranks step by themselves and meet at steps that `local_interval`
//                           divides; it doubles after local_step_scaler steps, up to local_step_clipper
#pragma once

#include <cstdint>

namespace ds::compression {

struct ZeroOneRule {
  int64_t var_freeze_step = 100000;
  int64_t var_update_scaler = 16;
  int64_t local_step_scaler = 32678;
  int64_t local_step_clipper = 16;
  bool bias_correction = true;
  bool deepspeed_semantics = false;
};

struct ZeroOneStep {
  bool updates_variance = false;  // from a dense mean of gradients
  bool frozen = false;            // the variance; ranks step by themselves
  bool first_frozen = false;
  bool meets = false;            // frozen: ranks exchange what they have stepped
  int64_t variance_updates = 0;  // up to and including this step
};

// Remembers where it is: steps in order, and the one before, cost constant time.
class ZeroOneSchedule {
 public:
  // Throws ConfigError for values out of range.
  explicit ZeroOneSchedule(const ZeroOneRule& rule);
  // Step `step`, from 1.
  ZeroOneStep at(int64_t step);

 private:
  void advance();

  ZeroOneRule rule_;
  int64_t first_frozen_;
  // What step `step_` does and the step before it did, and the intervals and counters that hold after it.
  int64_t step_ = 0;
  ZeroOneStep now_;
  ZeroOneStep before_;
  int64_t variance_interval_ = 1;
  int64_t variance_counter_ = 0;
  int64_t local_interval_ = 1;
  int64_t local_counter_ = 0;
};

}  // namespace ds::compression
