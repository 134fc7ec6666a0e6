// The files of a model's first values, matched with the whole model: which tensors they have, which rows of them, and
// where the values come from that they lack.
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

struct StartFilesOptions {
  const char* call = "initialize";  // the call to name in messages
  std::string weights;              // what open_weights() takes; empty: there are no files
  WeightsOptions match = {};
  bool has_match = true;  // whether the call has the option .weights_options
  uint64_t seed = 0;      // of the random numbers that match.fill draws
};

// Tensors are known by their names in the module, a tied parameter by each of them.
class StartFiles {
 public:
  explicit StartFiles(StartFilesOptions options);
  ~StartFiles();
  StartFiles(const StartFiles&) = delete;
  StartFiles& operator=(const StartFiles&) = delete;

  bool given() const { return !options_.weights.empty(); }
  // Returns lines "what<TAB>value" of what every rank has to give alike.
  std::string settings() const;
  // Has the first rank of each part of the model open the files and match them with the module; a second call, and one
  // without files, does nothing. World rank 0 logs what the two do not have in common. Throws IoError and UsageError on
  // every rank for a file that cannot be read or does not fit. Collective over all ranks.
  void open(const torch::nn::Module& module, const Ranks& ranks);

  // Whether the files have all elements of the tensor, and nobody has settled it.
  bool give(const std::string& name) const { return given() && !made_.contains(name) && !settled_.contains(name); }
  // Whether the module's tensor of this name has its first values by now.
  bool is_settled(const std::string& name) const { return !given() || settled_.contains(name); }
  // Notes that the module's tensor has got its values from values().
  void settle(const std::string& name) { settled_.insert(name); }
  // Returns the full first values of a tensor that is not settled: those of the files, of the program, or of both.
  // Undefined on a rank that is no first one of its part, unless all of them have to read the module's tensor,
  // which zero::Init may have to gather. `tensor`: the module's.
  at::Tensor values(const std::string& name, const at::Tensor& tensor) const;

  // What files and model do not have in common, over all stages of a pipeline; the same on all ranks.
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
  std::vector<std::unique_ptr<checkpoint::Source>> files_;  // of a first rank, later ones over earlier ones
  std::map<std::string, Found> found_;                      // of a first rank
  // Tensors that the program makes, all of them or the rows behind the file's: the number of rows that a file has.
  std::map<std::string, int64_t> made_;
  std::set<std::string> settled_;
  WeightsReport report_;
};

}  // namespace ds::engine
