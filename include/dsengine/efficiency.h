// Work that a step leaves out to save time: a curriculum begins with shorter samples (curriculum_learning) or easier
// ones (data_efficiency.data_sampling); whole layers are dropped (progressive_layer_drop), tokens of a layer
// (data_efficiency.data_routing.random_ltd), or blocks of attention (sparse_attention).
//
// The functions at the end of this header make the objects from an engine's ds_config, once, after initialize(). The
// program uses them in forward or where batches are made:
//
//   const auto curriculum = engine::curriculum(engine);
//   model->drop = engine::progressive_layer_drop(engine);   // a member that forward uses
//   ...
//   tokens = curriculum->truncate(tokens, 1);               // [batch, time] to the running difficulty
//   for (size_t i = 0; i < blocks.size(); ++i) {
//     x = (*drop)(i, blocks.size(), x, [&](const at::Tensor& h) { return blocks[i]->forward(h); });
//   }
//
// Where a section is off, its object changes nothing, so a program may always have it. Where a section is on and the
// program has not asked for its object by the first step, step() throws UsageError: nothing that a config asks for is
// left out in silence. Everything is a function of the step and the seed, so a resumed run goes on as it was. The
// objects refer to the engine without owning it and throw UsageError after its end. They are used on the engine's
// thread. docs/data_efficiency.md.
//
// Which tokens or layers are dropped depends on the seed, the optimizer step, the layer and how often the layer has run
// in the step. It is the same on all ranks of a model and in a run that is resumed, and no generator of the program
// moves. In a checkpointed region a layer that is computed again decides as it did the first time, on the thread that
// computes the region. Layers that run on several threads at once need an object each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/difficulty_schedule.h"
#include "dsengine/sparse_attention.h"

namespace ds::efficiency {

// Where a training run stands.
struct TrainingState {
  int64_t optimizer_steps = 0;  // steps done, skipped ones too
  bool training = true;         // the module's mode
  int64_t accumulation = 0;     // changes when an accumulation begins, also one that replaces one undone
};
using TrainingStateSource = std::function<TrainingState()>;

// Counts how often each layer has run in the running accumulation.
class LayerRuns {
 public:
  // Returns the index of the layer's micro-batch, from 0. Forwards without a graph are not counted.
  int64_t next(int64_t layer, const TrainingState& state);

 private:
  int64_t step_ = -1;
  int64_t accumulation_ = -1;
  std::map<int64_t, int64_t> runs_;
};

// "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping" (Zhang and He, 2020).
// After t optimizer steps, theta(t) = (1 - theta) exp(-gamma t) + theta. Layer i of L is kept with the probability
// p_i = 1 - i (1 - theta(t)) / L, so the first layer always is. What a kept layer adds to its input is divided by p_i,
// which keeps the expectation (DeepSpeed's example divides by p_(i+1)): x + (layer(x) - x) / p_i. A dropped layer gives
// x.
class ProgressiveLayerDrop {
 public:
  // Throws UsageError unless 0 < theta <= 1 and gamma >= 0.
  ProgressiveLayerDrop(double theta, double gamma, uint64_t seed, TrainingStateSource state);

  // theta(t) of the running step.
  double theta() const;
  // The probability p_layer of the running step. Throws UsageError for a layer outside of [0, layers).
  double keep_probability(int64_t layer, int64_t layers) const;
  // Runs or drops layer `layer` of `layers`. `function` maps x to a tensor of its shape and dtype, with the residual
  // connection inside. In evaluation mode, and with a theta of 1, all layers run as they are. Throws UsageError when
  // `function` returns another shape.
  at::Tensor operator()(int64_t layer, int64_t layers, const at::Tensor& x,
                        const std::function<at::Tensor(const at::Tensor&)>& function);

 private:
  double theta_at(int64_t steps) const;
  double keep_probability_at(int64_t layer, int64_t layers, int64_t steps) const;

  double theta_;
  double gamma_;
  uint64_t seed_;
  TrainingStateSource state_;
  LayerRuns runs_;
};

// Options of RandomLtd.
struct RandomLtdOptions {
  std::vector<int64_t> layers;  // the layers that drop tokens
  DifficultySchedule kept;      // how many tokens each of them keeps, by optimizer step
  int64_t sequence_dim =
      1;  // the dimension of time: 1 for states [batch, time, channels], 0 for [time, batch, channels]
};

// "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (Yao et al.,
// 2022). A layer of the list sees r of the s tokens of each sample, drawn for each layer and sample and in order; the
// others pass it by. Ranks with other samples draw other tokens.
class RandomLtd {
 public:
  // `data_rank`: makes the draws of ranks with other samples differ.
  RandomLtd(RandomLtdOptions options, uint64_t seed, int data_rank, TrainingStateSource state);

  // The number of tokens that a layer keeps in the running optimizer step. A layer whose sequences are not longer drops
  // none.
  int64_t kept_tokens() const;
  // Whether the layer is one that drops tokens.
  bool drops_in(int64_t layer) const;
  // Runs layer `layer` on the tokens it keeps. `function` maps hidden states [batch, r, channels] ([r, batch,
  // channels]) and int64 positions [batch, r] of their tokens in the sequence to states of the same shape. Where
  // nothing is dropped (other layers, evaluation, r >= s) it gets x as it is and undefined positions. Throws UsageError
  // for x without three dimensions and when `function` returns another shape.
  at::Tensor operator()(int64_t layer, const at::Tensor& x,
                        const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& positions)>& function);

 private:
  // The inputs of a draw; a region that is computed again must find them unchanged.
  struct Draw {
    bool training;
    int64_t step;
    int64_t run;
  };
  Draw draw(int64_t layer);
  at::Tensor positions_of(int64_t layer, const Draw& draw, const at::Tensor& x, int64_t kept) const;

  RandomLtdOptions options_;
  uint64_t seed_;
  int data_rank_;
  TrainingStateSource state_;
  LayerRuns runs_;
};

// Cut a mask [batch or 1, heads or 1, time, time] down to the r tokens that are kept. causal_mask_of() takes the first
// r rows and columns, since a causal mask depends on the order alone; padding_mask_of() gathers the rows and columns of
// the positions. Undefined positions give the whole mask.
at::Tensor causal_mask_of(const at::Tensor& mask, const at::Tensor& positions);
at::Tensor padding_mask_of(const at::Tensor& mask, const at::Tensor& positions);

}  // namespace ds::efficiency

namespace ds::engine {

class BatchSampler;
class CurriculumSampler;
class Engine;

// The length of samples by optimizer step, as the section curriculum_learning says.
class Curriculum {
 public:
  explicit Curriculum(std::weak_ptr<Engine> engine);

  // The difficulty of the step that runs (DeepSpeed's curriculum_seqlen); nothing where the section is off.
  std::optional<int64_t> difficulty() const;
  // Returns the first difficulty() entries along `dim`, as a view; the whole tensor where there are fewer, or where the
  // section is off.
  at::Tensor truncate(const at::Tensor& tensor, int64_t dim) const;
  // Sets the schedule of schedule_type "custom": it returns the difficulty of an optimizer step, counted from 1, and
  // must be equal on all ranks.
  void set_custom_schedule(std::function<int64_t(int64_t step)> schedule);

 private:
  std::weak_ptr<Engine> engine_;
  efficiency::DifficultySchedule schedule_;
  bool enabled_;
};

// Chooses the samples of each batch. With .training_data the engine's loader asks it; a program that loads data itself
// asks it like this:
//
//   const auto sampler = engine::data_sampler(engine, dataset.size());   // before load_checkpoint()
//   for (const int64_t index : sampler->next_batch()) ...                // this rank's micro-batch
//
// With data_efficiency.data_sampling batches are chosen by the difficulties of its metrics; without it each epoch is a
// shuffled dataset. Engine checkpoints keep its position, also for another number of ranks. It may outlive the engine.
class DataSampler {
 public:
  DataSampler(std::shared_ptr<BatchSampler> sampler, bool of_loader);  // called by data_sampler()

  // Returns the indices of this rank's next train_micro_batch_size_per_gpu samples, equal on all ranks of a pipeline.
  // Returns none at the end of an epoch: the call after that begins the next one. Throws UsageError where the engine's
  // loader takes the batches; ConfigError where no sample is easy enough, and for a difficulty that falls.
  std::vector<int64_t> next_batch();
  // The number of batches in an epoch. With a curriculum an epoch is num_epochs times the dataset.
  int64_t batches_per_epoch() const;
  // The difficulty of the last batch by this metric; before the first batch, and after a load, that of the next one.
  // Nothing where data_sampling is off. Throws UsageError for a name that no metric has.
  std::optional<int64_t> difficulty(const std::string& metric) const;
  // Sets the schedule of a metric of schedule_type "custom": it returns the difficulty of a global batch, counted from
  // 1, and must be equal on all ranks.
  void set_custom_schedule(const std::string& metric, std::function<int64_t(int64_t step)> schedule);

 private:
  std::shared_ptr<BatchSampler> sampler_;
  CurriculumSampler* curriculum_;  // sampler_, where that is one; else null
  bool of_loader_;
};

// Makes the sampler, and reads the files of metrics. Without .training_data give `dataset_size`, equal on all ranks.
// Throws IoError for the files, and UsageError where the first call comes too late for load_checkpoint() to set its
// position.
std::shared_ptr<DataSampler> data_sampler(const std::shared_ptr<Engine>& engine,
                                          std::optional<int64_t> dataset_size = std::nullopt);
// Make the curriculum, the layer drop and the random-LTD of the engine's config.
std::shared_ptr<Curriculum> curriculum(const std::shared_ptr<Engine>& engine);
std::shared_ptr<efficiency::ProgressiveLayerDrop> progressive_layer_drop(const std::shared_ptr<Engine>& engine);
std::shared_ptr<efficiency::RandomLtd> random_ltd(const std::shared_ptr<Engine>& engine);
// Makes attention with the pattern of the section `sparse_attention`, or over all blocks without that section. `heads`
// counts all heads of a layer, also where the model is split over ranks. Random blocks are drawn from the config's
// `seed`. It may outlive the engine.
std::shared_ptr<ops::SparseSelfAttention> sparse_self_attention(const std::shared_ptr<Engine>& engine, int64_t heads);

}  // namespace ds::engine
