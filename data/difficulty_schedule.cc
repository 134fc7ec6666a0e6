#include "dsengine/difficulty_schedule.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace ds::efficiency {
namespace {

int64_t grown(const DifficultySchedule& s, int64_t step, double root_degree) {
  if (s.min_difficulty == s.max_difficulty) return s.max_difficulty;
  const double done = std::max(0.0, static_cast<double>(step) / static_cast<double>(s.total_curriculum_step));
  const double share = std::pow(done, 1.0 / root_degree);
  const auto span = static_cast<double>(s.max_difficulty - s.min_difficulty);
  const auto enough = static_cast<double>(s.max_difficulty + s.difficulty_step);  // long after the last step
  const auto whole =
      static_cast<int64_t>(std::floor(std::min(share * span + static_cast<double>(s.min_difficulty), enough)));
  const int64_t least = (s.min_difficulty + s.difficulty_step - 1) / s.difficulty_step * s.difficulty_step;
  return std::min(std::max(whole - whole % s.difficulty_step, least), s.max_difficulty);
}

int64_t listed(const DifficultySchedule& s, int64_t step) {
  for (size_t i = 0; i < s.max_step.size(); ++i) {
    if (step <= s.max_step[i] || s.difficulty[i] >= s.max_difficulty) return s.difficulty[i];
  }
  return s.difficulty.back();
}

}  // namespace

int64_t DifficultySchedule::at(int64_t step) const {
  switch (kind) {
    case Kind::kFixedLinear:
      return grown(*this, step, 1);
    case Kind::kFixedRoot:
      return grown(*this, step, root_degree);
    case Kind::kFixedDiscrete:
      return listed(*this, step);
    case Kind::kCustom:
      break;
  }
  require(custom != nullptr, "curriculum: schedule_type is \"custom\": expected a function of the step, found none; ",
          "give it with set_custom_schedule()");
  return custom(step);
}

}  // namespace ds::efficiency
