// What a tensor_parallel section does to a model whose parameters are known by name. Pure, torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "dsengine/config_parallel.h"
#include "dsengine/split_plan.h"

namespace ds::tool {

// Parameters whose names differ in numbers alone, of equal sizes and one fate.
struct SplitGroup {
  std::string names;  // "h.*.attn.qkv.weight"
  int64_t count = 0;
  std::vector<int64_t> sizes;
  std::string cut;     // "dimension 0 in blocks 64, 16, 16"; "whole"
  std::string reason;  // in words
};

struct SplitReport {
  int64_t ranks = 1;
  std::vector<SplitGroup> groups;
  std::vector<std::string> warnings;
  int64_t model_elements = 0;  // of the whole model
  int64_t rank_elements = 0;   // that the rank with most has
  int64_t part_elements = 0;   // of these, of cut parameters
  // What a rank of the axis sends for each token of a micro-batch, forward and backward: 2 (T - 1) / T elements for
  // each that row layers and the embedding put out, and that column layers and the head read; and bytes for three
  // numbers in float32 of a vocabulary-parallel loss.
  double sent_elements_per_token = 0;
  double sent_loss_bytes_per_token = 0;
};

// Throws ConfigError as engine::split_rules.
SplitReport report_splits(const engine::config::TensorParallelSection& section,
                          const std::vector<parallel::NamedShape>& parameters);

nlohmann::ordered_json to_json(const SplitReport& report);
void print(const SplitReport& report, std::ostream& out);

}  // namespace ds::tool
