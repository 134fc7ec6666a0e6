// The facts that sizes of a model's parameters tell of its layers: which dimension is a weight's output, what is fused
// in it, how large a head is. Pure, torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "config/split/layer_names.h"
#include "config/split/logical_cut.h"
#include "config/split/rules_from_names.h"
#include "dsengine/split_plan.h"

namespace ds::engine {

// Keeps a reference to the parameters.
class LayerSizes {
 public:
  // `grain`: tensor_parallel.tp_grain_size, for cuts where the size of a head is not known.
  LayerSizes(const std::vector<parallel::NamedShape>& parameters, int64_t grain);

  const std::vector<parallel::NamedShape>& parameters() const { return parameters_; }

  // The cut of a weight whose layer is known.
  SplitDecision decision(const parallel::NamedShape& weight, const KnownLayer& layer, std::string origin) const;
  // The grain of a cut that layer_specs give.
  int64_t grain_for(const parallel::NamedShape& weight, const LogicalCut& cut) const;
  // The decision for the bias beside a weight, with its name; nothing where there is none of the weight's outputs.
  std::optional<std::pair<std::string, SplitDecision>> bias_decision(const parallel::NamedShape& weight,
                                                                     const SplitDecision& decision) const;
  // Warnings about heads that `ranks` cut in the middle, as far as sizes tell.
  std::vector<std::string> uneven(const std::unordered_map<std::string, SplitDecision>& decisions, int64_t ranks) const;

 private:
  const parallel::NamedShape* find(const std::string& name) const;
  int64_t output_dim(const parallel::NamedShape& weight) const;
  bool stores_inputs_first() const;
  std::vector<int64_t> fused_blocks(const parallel::NamedShape& weight, Fusion fusion, int64_t dim) const;
  std::optional<int64_t> attention_width(const parallel::NamedShape& weight) const;
  std::optional<int64_t> head_size(const parallel::NamedShape& weight) const;

  const std::vector<parallel::NamedShape>& parameters_;
  std::unordered_map<std::string, const parallel::NamedShape*> by_name_;
  int64_t grain_;
  bool inputs_first_;  // GPT-2's weights are [in, out]
};

}  // namespace ds::engine
