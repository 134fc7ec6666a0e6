// The samples of a dataset in the order of one metric, as files of DeepSpeed's DataAnalyzer have them: row r of
// <metric>_index_to_sample is the samples of the r-th least value, row r of <metric>_index_to_metric is that value.
// Those that a difficulty admits are the first ones of the order. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/indexed_dataset.h"
#include "dsengine/difficulty_schedule.h"

namespace ds::efficiency {

// Any thread.
class MetricFiles {
 public:
  // Of a metric that chooses samples. Reads all of it once: each sample is a number below `dataset_size` and there at
  // most once, values grow from row to row. Throws IoError that begins with the key of the config and names the file.
  MetricFiles(const SampleMetric& metric, int64_t dataset_size);

  const std::string& name() const { return name_; }
  int64_t size() const { return samples_.elements(); }
  // A place in the order, from 0.
  int64_t sample(int64_t place) const { return samples_.element(place); }
  // How many samples a difficulty admits. By value: those of at most that value. By percentile: as DeepSpeed counts,
  // size() / max_difficulty (whole) for each, all of them at max_difficulty.
  int64_t admitted(int64_t difficulty) const;
  // Of the easiest sample, for messages: a value, or "percentile 1".
  std::string least() const;
  uint64_t digest() const { return digest_; }

 private:
  void check_values();
  void check_samples(int64_t dataset_size);

  std::string name_;
  IndexedDataset samples_;
  std::optional<IndexedDataset> values_;  // none: by percentile
  int64_t max_difficulty_;
  uint64_t digest_ = 0;
};

}  // namespace ds::efficiency
