// tensor_parallel.partition_config: which layers are cut and how, by patterns of their names. DeepSpeed's AutoTPConfig.
// Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ds::engine::config {

enum class PartitionType { kColumn, kRow, kSkip };

// "column", "row", "skip"
const char* name_of(PartitionType type);

// One dimension of a logical shape.
struct LogicalSize {
  int64_t size = -1;           // -1: what is left
  std::vector<int64_t> parts;  // sizes of what was fused here, in place of `size`

  bool operator==(const LogicalSize&) const = default;
};

// An entry of layer_specs.
struct LayerPartition {
  std::vector<std::string> patterns;  // regular expressions, from the start of a parameter's name
  PartitionType type = PartitionType::kColumn;
  std::vector<LogicalSize> shape;        // what the weight is viewed as; empty: as it is
  std::optional<int64_t> partition_dim;  // of the shape; empty: 0 for columns, 1 for rows
  std::vector<std::string> model_types;  // empty: any
  bool gather_output = false;            // what the layer computes is joined; a column layer's
  bool grad_allreduce = false;           // of no effect: gradients of whole parameters are complete on each rank
};

struct PartitionConfig {
  int64_t tp_size = 1;
  std::vector<LayerPartition> layer_specs;
  std::optional<int64_t> embedding_partition_dim;  // empty: 0, the vocabulary (DeepSpeed: 1)
  std::vector<std::string> lm_head_patterns = {"lm_head", "embed_out"};
  bool use_default_specs = true;  // preset_model's entries follow these
  bool strict_mode = false;       // a matrix that no entry names is an error
  // Ours: names of modules and styles as a Hugging Face model's tp_plan has them, in its order.
  std::vector<std::pair<std::string, std::string>> tp_plan;
};

// Told a json pointer and what is wrong there.
using PartitionProblem = std::function<void(const std::string& pointer, const std::string& message)>;

// Reads null or an object. A value that is wrong keeps its default.
PartitionConfig read_partition_config(const nlohmann::ordered_json& json, const PartitionProblem& problem);

}  // namespace ds::engine::config
