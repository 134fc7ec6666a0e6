// The requests of compression_training of a ds_config: one Rule for each group of each method that is enabled, checked.
// Torch-free. Keys and defaults are those of DeepSpeed 0.19.6; docs/model_compression.md says where its code differs.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::model_compression {

enum class Method {
  kWeightQuantization,
  kActivationQuantization,
  kSparsePruning,
  kRowPruning,
  kHeadPruning,
  kChannelPruning
};
// The name of the method's section.
const char* name_of(Method method);

// Bits fall from start to target by one at a time: after `period` steps, then after twice, four times ... as many.
struct BitSchedule {
  int64_t start = 0;
  int64_t target = 0;
  int64_t period = 1;      // 0: one bit with every step
  double mixed_ratio = 0;  // of fp16_mixed_quantize: how much less of the unquantised weight a step has; 0: none at all
};
// The bits of a step, counted from 0 where the schedule begins.
int64_t bits_at(const BitSchedule& schedule, int64_t step);
// The share of the unquantised weight, from 1 down to 0 since the last change of bits.
double float_share_at(const BitSchedule& schedule, int64_t step);

// A block of a weight as a matrix: elements that are pruned together.
struct BlockSize {
  int64_t rows = 4;
  int64_t columns = 1;
};

// The options of "snip_momentum", see layers/compressed/snip_momentum.h.
struct SnipSchedule {
  int64_t last = 0;    // the last step that may change masks
  int64_t stride = 1;  // steps between changes
  BlockSize block;
};

struct Rule {
  Method method = Method::kWeightQuantization;
  std::string path;                               // "compression_training.row_pruning.different_groups.rp1"
  std::vector<std::string> modules;               // regular expressions, searched for in names; "*": all
  std::vector<std::vector<std::string>> related;  // of each of them: layers that lose dimensions with it; or empty
  int64_t schedule_offset = 0;                    // the first optimizer step with it, counted from 0
  // Fields of quantisation.
  BitSchedule bits;  // of activations: start alone
  bool symmetric = true;
  bool stochastic = false;
  bool static_range = false;
  int64_t groups = 1;
  // Fields of pruning.
  bool learns_scores = false;        // "topk"; else "l1" or
  std::optional<SnipSchedule> snip;  // "snip_momentum"
  double dense_ratio = 1;
  int64_t heads = 0;
  std::vector<std::string> excluded;  // of sparse_pruning
};

// Told of each mistake, with its path below compression_training. `fatal`: false for keys that nobody knows.
using AddProblem = std::function<void(const std::string& path, const std::string& message, bool fatal)>;
// `section`: {"shared_parameters", "different_groups"}. Nothing where it is not enabled.
std::vector<Rule> read_method(Method method, const nlohmann::ordered_json& shared, const nlohmann::ordered_json& groups,
                              const AddProblem& add);

}  // namespace ds::model_compression
