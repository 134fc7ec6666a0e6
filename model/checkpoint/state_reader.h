// Reads a checkpoint into the model: every rank the parts of logical tensors that its own layout has.
#pragma once

#include <exception>

#include "dsengine/checkpoint.h"
#include "model/checkpoint/checkpoint_fit.h"
#include "model/checkpoint/checkpoint_pieces.h"
#include "model/checkpoint/rank_state.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Options of reading a checkpoint.
struct ReadOptions {
  bool with_states = true;  // read optimizer states
  bool module_only = false;
  bool over = false;  // what the source lacks stays
};

// Reads one checkpoint. The methods are called in this order; after an exception the model is a mixture of old and new
// values. All arguments outlive the reader.
class StateReader {
 public:
  StateReader(const ModelState& model, checkpoint::Source& source, const CheckpointFit& fit, const ReadOptions& options)
      : model_(model), source_(source), fit_(fit), options_(options) {}

  // Reads what this rank has by itself, without a collective.
  void read();
  // Reads encoded slices, which are made from whole buckets. Collective; returns the exception of this rank.
  std::exception_ptr read_encoded();
  // Gives operators the new parameters. Collective.
  void publish() const;
  // Whether read() has found what the optimizer keeps for this rank alone.
  bool has_rank_states() const { return has_rank_states_; }
  // Whether read() has found the moving average of the weights, where the model keeps one.
  bool has_average() const { return has_average_; }

 private:
  void read_trained(size_t bucket);
  void read_average(size_t bucket, const BucketRange& range);
  void read_frozen_bucket(size_t frozen);
  void read_frozen_parameters();
  void read_encoded_bucket(size_t frozen);
  bool read_memory(const NamedTensors& memory);
  void read_optimizer_memory();
  void read_compression_memory();
  void read_fp8_memory() const;
  void forget_own_steps() const;

  const ModelState& model_;
  checkpoint::Source& source_;
  const CheckpointFit& fit_;
  ReadOptions options_;
  bool has_rank_states_ = false;
  bool has_average_ = false;
};

}  // namespace ds::engine
