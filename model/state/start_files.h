// The files of weights that a model starts with (InitializeOptions::weights), matched with the whole model before it is
// split: which tensors and which of their rows the files have, and where the other values come from.
//
// A "first rank" is rank 0 of a data-parallel group (Ranks::part). Only first ranks open the files.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"
#include "model/state/ranks.h"

namespace ds::engine {

// The options of a call that takes files of weights.
struct StartFilesOptions {
  const char* call = "initialize";  // the call to name in messages
  std::string weights;              // a path for checkpoint::open_weights(); empty: there are no files
  WeightsOptions match = {};
  bool has_match = true;  // whether the call has the option .weights_options
  uint64_t seed = 0;      // the seed of the random numbers that match.fill draws
};

// Matches the files with a module and gives the full first values of its tensors, one at a time. Tensors are named as
// in the module, a tied parameter by any of its names. Used by the engine's thread.
class StartFiles {
 public:
  // Throws UsageError for options in `match` without a file that they are about.
  explicit StartFiles(StartFilesOptions options);
  ~StartFiles();
  StartFiles(const StartFiles&) = delete;
  StartFiles& operator=(const StartFiles&) = delete;

  // Whether the program has given files.
  bool given() const { return !options_.weights.empty(); }
  // Returns the options that have to be the same on all ranks, as lines "what<TAB>value".
  std::string settings() const;
  // Has each first rank open the files and match them with the module. A second call, and one without files, does
  // nothing. World rank 0 logs the tensors that the two do not have in common. Throws on every rank: for a file that
  // cannot be read or does not fit the cause on the rank that opened it and IoError on the others, for a file or a
  // pattern that matches nothing UsageError. Collective over all ranks.
  void open(const torch::nn::Module& module, const Ranks& ranks);

  // Whether the values of the tensor, which is the model's, come from the files alone, and it is not settled yet.
  bool give(const std::string& name) const { return given() && !made_.contains(name) && !settled_.contains(name); }
  // Whether the module's tensor of this name has its first values by now.
  bool is_settled(const std::string& name) const { return !given() || settled_.contains(name); }
  // Notes that the module's tensor has got its values from values().
  void settle(const std::string& name) { settled_.insert(name); }
  // Returns the full first values of a tensor that is not settled: from the files, from the module or match.fill, or
  // their first rows from the files and the others from there. They are on the CPU in the file's dtype, on the CPU in
  // float32 or float64 from match.fill, and where the module's own values are among them as `tensor` is, which may be
  // the same memory. `tensor`: the module's. To be called on every rank of the group, because zero::Init may gather the
  // module's tensor; ranks other than a first one get an undefined tensor where the module's values are not needed.
  at::Tensor values(const std::string& name, const at::Tensor& tensor) const;

  // The tensors that files and model do not have in common, over all stages of a pipeline; the same on all ranks.
  const WeightsReport& report() const { return report_; }

 private:
  struct Found {
    size_t file = 0;
    std::string path;
  };
  class Matching;

  at::Tensor file_values(const Found& found) const;
  at::Tensor filled(const std::string& name, const std::vector<int64_t>& sizes, at::ScalarType dtype) const;
  void share(const std::string& own, const Ranks& ranks);
  void log_report() const;

  StartFilesOptions options_;
  bool opened_ = false;
  std::vector<std::unique_ptr<checkpoint::Source>> files_;  // on a first rank; later ones replace earlier ones
  std::map<std::string, Found> found_;                      // on a first rank: the place of each tensor in the files
  // Tensors of which the files lack elements, with the number of rows that a file has; 0: the files lack all of it.
  std::map<std::string, int64_t> made_;
  std::set<std::string> settled_;
  WeightsReport report_;
};

}  // namespace ds::engine
