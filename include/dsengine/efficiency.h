// What a ds_config asks of the program's own forward: shorter samples at first (curriculum_learning), easier ones
// (data_efficiency.data_sampling), layers that are left out (progressive_layer_drop), tokens that are left out
// (data_efficiency.data_routing.random_ltd), blocks of attention that are left out (sparse_attention). Made once, of
// the engine, after initialize(); used in forward or where batches are made:
//
//   const auto curriculum = engine::curriculum(engine);
//   model->drop = engine::progressive_layer_drop(engine);   // a member that forward uses
//   ...
//   tokens = curriculum->truncate(tokens, 1);               // [batch, time] to the running difficulty
//
// Where a section is off they change nothing, so that a program has them always. Where it is on and the program has not
// asked by the first step, step() throws UsageError: nothing that a config asks for is left out in silence. All are
// functions of the step and the seed: a resumed run goes on as it was. They refer to the engine without owning it and
// throw UsageError after its end. Threads: as the engine. docs/data_efficiency.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/engine.h"
#include "dsengine/layer_drop.h"
#include "dsengine/sparse_attention.h"

namespace ds::engine {

class BatchSampler;
class CurriculumSampler;

class Curriculum {
 public:
  explicit Curriculum(std::weak_ptr<Engine> engine);

  // Of the step that runs (of DeepSpeed's curriculum_seqlen); nothing where the section is off.
  std::optional<int64_t> difficulty() const;
  // The first difficulty() entries of `dim`, as a view; the whole where there are fewer, or the section is off.
  at::Tensor truncate(const at::Tensor& tensor, int64_t dim) const;
  // For schedule_type "custom": the difficulty of an optimizer step, counted from 1. The same on all ranks.
  void set_custom_schedule(std::function<int64_t(int64_t step)> schedule);

 private:
  std::weak_ptr<Engine> engine_;
  efficiency::DifficultySchedule schedule_;
  bool enabled_;
};

// Which samples batches have. With .training_data the engine's loader asks it; a program that loads data itself does:
//
//   const auto sampler = engine::data_sampler(engine, dataset.size());   // before load_checkpoint()
//   for (const int64_t index : sampler->next_batch()) ...                // this rank's micro-batch
//
// With data_efficiency.data_sampling batches are chosen as its metrics' difficulties say; without, each epoch is a
// shuffled dataset. Engine checkpoints keep where it stands, also for another number of ranks. It needs no engine.
class DataSampler {
 public:
  DataSampler(std::shared_ptr<BatchSampler> sampler, bool of_loader);  // by data_sampler()

  // Numbers of samples, train_micro_batch_size_per_gpu of them, the same on all ranks of a pipeline. Empty at the end
  // of an epoch: the call after that begins the next one. Throws UsageError where the engine's loader takes the
  // batches; ConfigError where no sample is easy enough, and for a difficulty that falls.
  std::vector<int64_t> next_batch();
  // With a curriculum an epoch is num_epochs times the dataset.
  int64_t batches_per_epoch() const;
  // Of the batch that came last; before the first, and after a load, of the next. Nothing where data_sampling is off;
  // UsageError for a name of no metric.
  std::optional<int64_t> difficulty(const std::string& metric) const;
  // For a metric of schedule_type "custom": the difficulty of a global batch, counted from 1. The same on all ranks.
  void set_custom_schedule(const std::string& metric, std::function<int64_t(int64_t step)> schedule);

 private:
  std::shared_ptr<BatchSampler> sampler_;
  CurriculumSampler* curriculum_;  // it, where it is one
  bool of_loader_;
};

// `dataset_size`: without .training_data; the same on all ranks. Reads the files of metrics. Throws IoError for those,
// UsageError where the first call comes too late for load_checkpoint() to set where it stands.
std::shared_ptr<DataSampler> data_sampler(const std::shared_ptr<Engine>& engine,
                                          std::optional<int64_t> dataset_size = std::nullopt);
std::shared_ptr<Curriculum> curriculum(const std::shared_ptr<Engine>& engine);
std::shared_ptr<efficiency::ProgressiveLayerDrop> progressive_layer_drop(const std::shared_ptr<Engine>& engine);
std::shared_ptr<efficiency::RandomLtd> random_ltd(const std::shared_ptr<Engine>& engine);
// The pattern of `sparse_attention` for layers of `heads` heads, all of them, of a model that is split over ranks too;
// without the section attention to all. Random blocks are drawn from the config's `seed`. It needs no engine after
// this.
std::shared_ptr<ops::SparseSelfAttention> sparse_self_attention(const std::shared_ptr<Engine>& engine, int64_t heads);

}  // namespace ds::engine
