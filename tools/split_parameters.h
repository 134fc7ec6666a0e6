// The report of --split_parameters: how a tensor_parallel section splits a model whose parameters are known by name.
// Torch-free: of safetensors files the header alone is read.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "dsengine/config_zero.h"
#include "dsengine/split_plan.h"

namespace ds::tool {

// Parameters that are split alike: their sizes are equal and their names differ in numbers alone.
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
  int64_t model_elements = 0;  // elements of the whole model
  int64_t rank_elements = 0;   // elements on the rank that has most
  int64_t part_elements = 0;   // elements of cut parameters among these
  // The elements that a rank of the axis sends for each token of a micro-batch, forward and backward: 2 (T - 1) / T for
  // each that row layers and the embedding put out, and for each that column layers and the head read. The bytes of the
  // loss are those of three float32 numbers a token where it is vocabulary-parallel.
  double sent_elements_per_token = 0;
  double sent_loss_bytes_per_token = 0;
};

// Applies the rules of `section` to the parameters. Throws ConfigError as engine::split_rules().
SplitReport report_splits(const engine::config::TensorParallelSection& section,
                          const std::vector<parallel::NamedShape>& parameters);

nlohmann::ordered_json to_json(const SplitReport& report);
void print(const SplitReport& report, std::ostream& out);

// Reads names and sizes of parameters from a .safetensors file, from all of them in a folder, or from a JSON object
// {"name": [sizes], ...}, in the order of the file. Throws IoError naming the path for what cannot be read, and for a
// name that comes twice.
std::vector<parallel::NamedShape> read_parameter_shapes(const std::string& path);

}  // namespace ds::tool
