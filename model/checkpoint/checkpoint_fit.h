// Which tensors of a checkpoint are those of this model, and whether they fit.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/checkpoint.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Advice for a checkpoint that does not fit, in the terms of the call that loads it.
struct FitHints {
  std::string fresh_states = "pass load_optimizer_states = false";
  std::string less = "Pass load_module_strict = false to take what both have";
};

// The demands on a checkpoint.
struct FitOptions {
  bool strict = true;        // an error names what only one of the two has
  bool with_states = true;   // optimizer states have to fit too
  bool all_weights = false;  // the model is a mixture now: none of its values may stay
  bool over = false;         // load_weights(): what the source lacks stays, strict or not
  FitHints hints = {};
};

// Matches a checkpoint with the model, and changes nothing. Model and source outlive it.
class CheckpointFit {
 public:
  // Throws UsageError, naming the source, where the checkpoint does not fit.
  CheckpointFit(const ModelState& model, checkpoint::Source& source, const FitOptions& options);

  // The parameters and buffers that stay, and the tensors of the source that the model lacks.
  const WeightsReport& report() const { return report_; }
  // The path of a parameter's weight in the source; empty where it has none.
  const std::string& weight(const std::string& parameter) const { return weights_.at(parameter); }
  // The name that the checkpoint has for a parameter, also of another stage; empty where it has none.
  std::string stored_name(const std::string& parameter) const;
  // The path of the state of a parameter in a trainable bucket, and the whole's shape; an empty path where the
  // checkpoint does not have the parameter.
  std::pair<std::string, std::vector<int64_t>> state_of(const std::string& kind, const Segment& segment) const;
  // The path of the moving average of a parameter; empty where the checkpoint has none.
  std::string average(const zero::Parameter& parameter) const;
  // Whether it was written by as many ranks, stages and ranks of a tensor axis as are here.
  bool same_ranks() const { return same_ranks_; }

 private:
  using Shapes = std::map<std::string, std::vector<int64_t>>;

  void find_weights(const FitOptions& options);
  void require_over(const FitOptions& options, const Shapes& wanted) const;
  void add_buffers(Shapes& wanted) const;
  void add_other_stages(Shapes& wanted) const;
  void require_states(const FitHints& hints) const;
  void require_own_states_only(const FitHints& hints) const;

  const ModelState& model_;
  checkpoint::Source& source_;
  bool same_ranks_;
  WeightsReport report_;
  std::map<std::string, std::string> weights_;  // parameter name -> path in the source, or empty
};

}  // namespace ds::engine
