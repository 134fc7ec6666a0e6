// A curriculum of samples: DeepSpeed's DeepSpeedDataSampler (data_efficiency.data_sampling).
//
// Global batch b, counted from 1, has the difficulties of step b. Where they have grown, the samples that they admit
// and earlier ones did not are a new cluster. Each sample of the batch is of a cluster that is drawn with a probability
// proportional to its size, and is the next one of that cluster's order, which is drawn anew when it is used up; then
// the batch is shuffled and dealt: micro-batch after micro-batch, of each the r-th part to rank r.
//
// All draws are functions of the seed, the number of the batch, the cluster and how often that was used up. So every
// rank draws for itself, without a word to the others; a global batch is the same on any number of ranks; and where the
// sampler stands is how much was drawn of each cluster, which a run that is resumed goes on from bit for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/batch_sampler.h"
#include "data/sample_metrics.h"
#include "dsengine/difficulty_schedule.h"

namespace ds::engine {

struct CurriculumOptions {
  std::vector<efficiency::SampleMetric> metrics;
  int64_t dataset_size = 0;  // samples; > 0
  int64_t batch_size = 1;    // samples of one rank in one micro-batch; > 0
  int64_t accumulation = 1;  // micro-batches of a global batch; > 0
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;
  int64_t num_epochs = 1000;  // an epoch of the sampler is that many times the dataset
  // true: an epoch ends where no whole micro-batch is left of its samples; false: with one that is whole all the same
  bool drop_last = false;
  bool tells = false;  // whether this rank writes to the log what is admitted
};

// Not thread safe.
class CurriculumSampler : public BatchSampler {
 public:
  // Reads the metric files. Throws IoError for those, UsageError for sizes out of range.
  explicit CurriculumSampler(const CurriculumOptions& options);

  std::unique_ptr<BatchSampler> copy() const override;

  // Throws ConfigError where nothing is admitted, and for a difficulty that falls. Where sizes were changed within a
  // global batch, its rest may be no whole micro-batch: that is left out with drop_last, and else shorter, filled up to
  // a multiple of world_size with the first samples of the batch.
  std::vector<int64_t> next_batch() override;
  int64_t dataset_size() const override { return options_.dataset_size; }
  int64_t batches_per_epoch() const override;
  bool has_equal_batches() const override { return true; }

  // Goes nowhere: throws UsageError but for the epoch that begins with the next batch.
  void set_epoch(int64_t epoch) override;
  void set_batch_size(int64_t batch_size) override;
  void set_accumulation(int64_t batches) override;

  const SamplerState& state() const override { return state_; }
  void load_state(const SamplerState& state) override;

  // The difficulty of the batch that was given last; before the first one, and after a load, that of the next. Throws
  // UsageError for a name that is none of the metrics'.
  int64_t difficulty(const std::string& metric) const;
  // Sets the difficulties of a metric with schedule_type "custom".
  void set_custom_schedule(const std::string& metric, std::function<int64_t(int64_t step)> schedule);

 private:
  size_t index_of(const std::string& metric) const;
  int64_t dealt_at_once() const { return options_.batch_size * options_.world_size; }
  int64_t samples_of_epoch() const { return options_.dataset_size * options_.num_epochs; }
  // The metrics that choose samples.
  std::vector<int64_t> difficulties_of(int64_t step) const;
  void grow(int64_t step);
  // The global batch that state_ stands in, from the clusters as they are.
  void draw();
  void end_global_batch();

  CurriculumOptions options_;
  std::shared_ptr<const std::vector<efficiency::MetricFiles>> files_;  // files of the metrics that choose samples
  efficiency::SampleClusters clusters_;
  SamplerState state_;                 // always with a curriculum
  std::vector<int64_t> difficulties_;  // the difficulties that clusters_ have grown to; empty: not grown
  std::vector<int64_t> batch_;         // the running global batch; empty: none is
  std::vector<int64_t> drawn_;         // samples drawn of each cluster, with the running global batch
  int64_t shown_step_ = 1;
};

}  // namespace ds::engine
