// How hard the samples of a step may be: curricula, and the number of tokens that random-LTD keeps. A pure function of
// the step, so that a run that is resumed, on any ranks, has nothing to restore. Torch-free; any thread.
//
// Follows DeepSpeed's CurriculumScheduler (data_efficiency/curriculum_scheduler.py) with the lower bound that 0.19.8
// has and 0.19.6 and its random-LTD lack: a schedule never gives less than its first step's difficulty.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ds::efficiency {

struct DifficultySchedule {
  enum class Kind { kFixedLinear, kFixedRoot, kFixedDiscrete, kCustom };

  Kind kind = Kind::kFixedLinear;
  int64_t min_difficulty = 1;
  int64_t max_difficulty = 1;
  // kFixedLinear and kFixedRoot: the difficulty grows with the root_degree-th root of the step, in multiples of
  // difficulty_step, from the least multiple that is not below min_difficulty to max_difficulty at
  // total_curriculum_step.
  int64_t total_curriculum_step = 1;
  int64_t difficulty_step = 1;
  double root_degree = 1;
  // kFixedDiscrete: difficulty[i] up to step max_step[i], the last one, which has no max_step, beyond; once it is
  // max_difficulty it stays.
  std::vector<int64_t> difficulty;
  std::vector<int64_t> max_step;
  // kCustom: the program's.
  std::function<int64_t(int64_t step)> custom = {};

  // The difficulty of a step, counted from 1: the run's first optimizer step is 1. Throws UsageError for kCustom
  // without a function.
  int64_t at(int64_t step) const;
};

// How hard a sample is by one metric, and what a step may have (data_efficiency.data_sampling).
struct SampleMetric {
  std::string name;
  // Files of DeepSpeed's DataAnalyzer, without .bin and .idx. Of a metric that chooses nothing neither is read, by
  // percentile only the first.
  std::string index_to_sample_path;
  std::string index_to_metric_path;
  bool by_percentile = false;  // false: a sample is admitted up to a value, true: up to a share of max_difficulty
  bool chooses = true;         // false (single_cluster): all samples are admitted, the program uses the difficulty
  DifficultySchedule schedule;
};

}  // namespace ds::efficiency
