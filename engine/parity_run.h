// What one of the runs of `ds-launch parity` does otherwise than a run by itself (docs/is_my_run_right.md).
//
// Note [One rank in the place of many]
// The reference is the same program on one rank. Its accumulation is as many times longer as the other run has
// data-parallel ranks, so that a step takes the same global batch: micro-batch i stands for rank i % ranks. Before each
// one LibTorch's default generators get the states that they had on that rank in the first run: what a program draws
// for batches and dropout is what the rank has drawn. The engine's loader gives the batches of the ranks in the same
// order. The second run of the layout takes the micro-batches of a step by place_in_step(), in the same way.
// With takes_global_batches the accumulation stays, and what the ranks take side by side is one micro-batch: for
// programs that cut a global batch by the number of ranks, and for statistics of BatchNorm over all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/parity/recorded_run.h"
#include "data/batch_sampler.h"
#include "dsengine/config.h"
#include "engine/make_sampler.h"

namespace ds::engine {

// What is recorded, and where.
struct ParityRun {
  // The order of the second run of the layout, by Note [Two orders of the same sums].
  enum class Order { kOwn, kOtherBatches, kOtherSamples };

  std::string folder;
  config::ConfigSource source;  // the ds_config that all runs begin with
  int64_t steps = 0;
  std::string like;                   // the folder of the first run; empty: this is the first
  Order order = Order::kOwn;          // with `like`: another one means the layout once more, kOwn the run on one rank
  bool keeps_batches = false;         // the first run writes batches down, the others read them
  bool takes_global_batches = false;  // one rank takes what all ranks take side by side as one micro-batch
  bool ends_process = false;          // after the last step

  // Reads the variables that ds-launch has set; nothing: the process is no part of such a run. Throws ConfigError for
  // values that are none.
  static std::optional<ParityRun> from_environment();

  // Whether this one rank stands for all data-parallel ranks of the first run.
  bool is_reference() const { return !like.empty() && order == Order::kOwn; }
  // The ds_config of this run: `source` or, for the reference, with the batches of the first run on one rank. Throws
  // ConfigError, naming the key, for what a single rank cannot repeat.
  config::ConfigSource config() const;
  // Makes the sampler of the engine's loader: that of make_sampler() in the first run.
  std::shared_ptr<BatchSampler> sampler(const config::DsConfig& config, const SamplerPlace& place, int64_t dataset_size,
                                        const EpochOrder& epochs = {}) const;
};

// Returns the place, among all micro-batches of a step of `layout`, where those of the ranks come in turn, of the one
// that a data-parallel rank takes as number `micro_batch`. In another order that is its own first one, for which a
// program may draw more or less than for others; then those of the rank that is as far from the last as it is from the
// first, the last one first. Of one micro-batch in a step it takes that rank's.
int64_t place_in_step(const RecordedLayout& layout, ParityRun::Order order, int64_t data_rank, int64_t micro_batch);

}  // namespace ds::engine
