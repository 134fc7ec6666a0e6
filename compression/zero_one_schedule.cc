#include "compression/zero_one_schedule.h"

#include <algorithm>

#include "core/check.h"

namespace ds::compression {

ZeroOneSchedule::ZeroOneSchedule(const ZeroOneRule& rule)
    : rule_(rule), first_frozen_(rule.var_freeze_step + (rule.deepspeed_semantics ? 2 : 1)) {
  const auto positive = [](const char* key, int64_t value, int64_t least) {
    require<ConfigError>(value >= least, "optimizer.params.", key, ": expected at least ", least, ", found ", value);
  };
  positive("var_freeze_step", rule.var_freeze_step, 1);
  positive("var_update_scaler", rule.var_update_scaler, 1);
  positive("local_step_scaler", rule.local_step_scaler, 1);
  positive("local_step_clipper", rule.local_step_clipper, 1);
}

ZeroOneStep ZeroOneSchedule::at(int64_t step) {
  ensure(step > 0, "steps begin at 1");
  if (step + 1 == step_) return before_;
  if (step < step_) *this = ZeroOneSchedule(rule_);
  while (step_ < step) advance();
  return now_;
}

void ZeroOneSchedule::advance() {
  before_ = now_;
  ++step_;
  now_.frozen = step_ >= first_frozen_;
  now_.first_frozen = step_ == first_frozen_;
  // DeepSpeed's first step makes its buffers only.
  const bool idle = rule_.deepspeed_semantics && step_ == 1;
  now_.updates_variance = !now_.frozen && !idle && step_ % variance_interval_ == 0;
  now_.meets = now_.frozen && step_ % local_interval_ == 0;
  if (now_.updates_variance) ++now_.variance_updates;
  if (!now_.frozen) {
    if (!idle && step_ % variance_interval_ == 0 && ++variance_counter_ == rule_.var_update_scaler) {
      variance_counter_ = 0;
      variance_interval_ *= 2;
    }
  } else if (++local_counter_ == rule_.local_step_scaler) {
    local_counter_ = 0;
    local_interval_ = std::min(rule_.local_step_clipper, local_interval_ * 2);
  }
}

}  // namespace ds::compression
