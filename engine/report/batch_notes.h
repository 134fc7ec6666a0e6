// Notes about the micro-batches of the running accumulation: their losses, and their names for a report on a NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/data_loader.h"

namespace ds::engine {

// Micro-batches count from 0. Nothing here waits for an accelerator, but first_bad_loss(). Not thread safe.
class BatchNotes {
 public:
  // Sets the name of the next micro-batch.
  void name_next(std::string name) { next_name_ = std::move(name); }
  // Begins or goes on with a micro-batch. One without a name is called by the samples of the batch that `loader` (may
  // be null) has given since the last call, if that was one: which of several it is, nobody knows.
  void begin(int64_t micro_batch, const DataLoader* loader);
  // Keeps a loss, a scalar without graph; several of one micro-batch are all kept. `weight`: its weight in the loss of
  // the step.
  void keep_loss(int64_t micro_batch, const at::Tensor& loss, double weight = 0.0);
  // Notes a pass without a known loss: the loss of the step is not known either.
  void lose_loss() { unknown_ = true; }
  // The sum of all losses times their weights, float64 [] on their device; undefined: there are none, or some are not
  // known.
  at::Tensor loss_of_step() const;
  // Forgets the micro-batches: the accumulation is over, or was dropped; then the loader may have given batches that
  // were not used.
  void forget(bool dropped = false);

  // The name of a micro-batch: "samples 17, 99 of the training data"; empty: it is not known.
  std::string name_of(int64_t micro_batch) const;
  struct BadLoss {
    int64_t micro_batch = 0;
    double loss = 0;
    int64_t others = 0;  // losses after it that are not finite either
  };
  // The first loss that is not finite; nothing: all are.
  std::optional<BadLoss> first_bad_loss() const;

 private:
  struct Named {
    int64_t micro_batch = 0;
    std::string name;
    std::vector<int64_t> samples;  // where there is no name
  };
  struct Kept {
    int64_t micro_batch = 0;
    at::Tensor loss;
    double weight = 0.0;
  };

  std::optional<std::string> next_name_;
  int64_t delivered_ = 0;  // batches of the loader at the last begin()
  bool dropped_ = false;
  std::vector<Named> named_;
  std::vector<Kept> losses_;
  bool unknown_ = false;  // a loss of the accumulation
};

// The name of a micro-batch from its samples, as in name_of().
std::string name_of_samples(const std::vector<int64_t>& samples);

}  // namespace ds::engine
