// Which parameters of a module are cut over ranks, and how: rules, and the plan that follows from them for names and
// sizes. Pure values and functions; safe from any thread. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::parallel {

// How the parameters of a layer are split over the ranks.
enum class Style : uint8_t {
  kColumn,      // weight [out, in] along out, bias too: each rank computes a part of the outputs
  kRow,         // weight along in, bias whole: each rank has a part of the inputs, outputs are added
  kVocabulary,  // an embedding, or the scores of a vocabulary, along its entries
  kWhole,       // replicated: each rank has the full parameter
};

// Which parameters are split, and how.
struct SplitRule {
  // A regular expression (ECMAScript) for the whole name of a module ("h.0.mlp.fc", its own parameters are meant) or of
  // a parameter ("h.0.mlp.fc.weight"). The first rule that matches decides; what none matches stays whole.
  std::string pattern;
  Style style = Style::kColumn;
  // Sizes of what was fused along the cut dimension, each of which is cut: {h, h, h} for query, key and value. Empty:
  // one block.
  std::vector<int64_t> blocks = {};
  // Parts are multiples of it: the size of a head where heads do not divide evenly. 1: nearly equal parts.
  int64_t grain = 1;
  // Dimension of the weight, where it is not the style's (weights stored as [in, out]).
  std::optional<int64_t> dim = std::nullopt;
  // Gathers the layer's output to a plain tensor: each rank has all of it (DeepSpeed's gather_output). A bias is then
  // not split.
  bool join_output = false;
  // Who made the rule, for the words of a plan ("tensor_parallel.preset_model llama"); empty: the program.
  std::string origin = {};
};

// The name and the sizes of a parameter.
struct NamedShape {
  std::string name;
  std::vector<int64_t> sizes;
};

// How one parameter is split.
struct ParameterSplit {
  std::string name;
  std::vector<int64_t> sizes;        // sizes of the full parameter
  int64_t dim = -1;                  // the dimension that is split; -1: none
  std::vector<int64_t> blocks = {};  // SplitRule::blocks
  int64_t grain = 1;
  std::string reason;           // in words
  Style style = Style::kWhole;  // the rule's, where the parameter is cut
  bool join_output = false;     // SplitRule::join_output
  bool by_rule = false;         // a rule matches its name, or another name of a tied parameter
  bool summed = false;  // whole, and its gradient is a sum over the ranks (ParallelizeOptions::sequence_parallel)

  bool is_split() const { return dim >= 0; }
};
using SplitPlan = std::vector<ParameterSplit>;

// Decides how each parameter is split, a pure function. Throws UsageError when a rule matches nothing, has a pattern
// that is no regular expression, or blocks that are not the dimension. A parameter that has too few elements for every
// rank to get some stays whole, and says so.
SplitPlan plan_splits(const std::vector<NamedShape>& parameters, const std::vector<SplitRule>& rules, int ranks);
// Returns one line of text for each parameter.
std::string describe(const SplitPlan& plan);

}  // namespace ds::parallel
