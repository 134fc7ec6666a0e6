// Parts of the model that a step leaves out: whole layers (progressive layer drop) and tokens of a layer (random-LTD).
// Both wrap a layer in forward; engine::progressive_layer_drop() and engine::random_ltd() of dsengine/efficiency.h make
// them from the ds_config of an engine:
//
//   for (size_t i = 0; i < blocks.size(); ++i) {
//     x = drop(i, blocks.size(), x, [&](const at::Tensor& h) { return blocks[i]->forward(h); });
//   }
//
// What is dropped is a function of the seed, the optimizer step, the layer and how often the layer has run in the step:
// it is the same on all ranks of a model and in a run that is resumed, and no generator of the program moves. Inside of
// a checkpointed region a layer that is computed again decides as it did, on the thread that computes the region.
// Layers that run on several threads at once need an object each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "dsengine/difficulty_schedule.h"

namespace ds::efficiency {

// What a training run is at.
struct TrainingState {
  int64_t optimizer_steps = 0;  // done, skipped ones too
  bool training = true;         // the module's mode
  int64_t accumulation = 0;     // changes when an accumulation begins, also one that takes the place of one undone
};
using TrainingStateSource = std::function<TrainingState()>;

// How often each layer has run in the running accumulation: the index of its micro-batch.
class LayerRuns {
 public:
  // Forwards without a graph are looks at the model, and not counted.
  int64_t next(int64_t layer, const TrainingState& state);

 private:
  int64_t step_ = -1;
  int64_t accumulation_ = -1;
  std::map<int64_t, int64_t> runs_;
};

// "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping" (Zhang and He, 2020).
// theta(t) = (1 - theta) exp(-gamma t) + theta after t optimizer steps; layer i of L is kept with the probability
// p_i = 1 - i (1 - theta(t)) / L, so the first always. A kept layer's change of its input is divided by p_i, which
// keeps the expectation (DeepSpeed's example divides by p_(i+1)): x + (layer(x) - x) / p_i; a dropped one gives x.
class ProgressiveLayerDrop {
 public:
  // Throws UsageError unless 0 < theta <= 1 and gamma >= 0.
  ProgressiveLayerDrop(double theta, double gamma, uint64_t seed, TrainingStateSource state);

  double theta() const;
  // Throws UsageError for a layer outside of [0, layers).
  double keep_probability(int64_t layer, int64_t layers) const;
  // `function`: from x to a tensor of its shape and dtype, with the residual connection inside. In evaluation mode, and
  // with a theta of 1, all layers run as they are. Throws UsageError for another shape.
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

struct RandomLtdOptions {
  std::vector<int64_t> layers;  // whose tokens are dropped
  DifficultySchedule kept;      // tokens that each of them keeps, by optimizer step
  int64_t sequence_dim = 1;     // of the hidden states: 1 of [batch, time, channels], 0 of [time, batch, channels]
};

// "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (Yao et al.,
// 2022). A layer of the list sees r of the s tokens of each sample, drawn for each layer and sample and in order; the
// others pass it by. Ranks with other samples draw other tokens.
class RandomLtd {
 public:
  // `data_rank`: makes the draws of ranks with other samples differ.
  RandomLtd(RandomLtdOptions options, uint64_t seed, int data_rank, TrainingStateSource state);

  // Of the running optimizer step; a layer of shorter sequences runs whole.
  int64_t kept_tokens() const;
  bool drops_in(int64_t layer) const;
  // `function`: from hidden states [batch, r, channels] ([r, batch, channels]) and int64 positions [batch, r] of its
  // tokens in the sequence to states of the same shape. Where nothing is dropped (other layers, evaluation, r >= s) it
  // gets x as it is and undefined positions. Throws UsageError for x without three dimensions and for another shape out
  // of it.
  at::Tensor operator()(int64_t layer, const at::Tensor& x,
                        const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& positions)>& function);

 private:
  // What a region that is computed again must find as it was.
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

// Masks [batch or 1, heads or 1, time, time] for the tokens that are kept. A causal one depends on the order alone, so
// that its first r rows and columns do; one with padding is gathered by rows and columns. Undefined positions give the
// mask.
at::Tensor causal_mask_of(const at::Tensor& mask, const at::Tensor& positions);
at::Tensor padding_mask_of(const at::Tensor& mask, const at::Tensor& positions);

}  // namespace ds::efficiency
