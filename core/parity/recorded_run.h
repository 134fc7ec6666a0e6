// The record of a run that `ds-launch parity` has started (core/parity/parity_names.h): losses and norms of its steps,
// and tensors that are read in place. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/files/mapped_file.h"

namespace ds {

struct RecordedLayout {
  int64_t data_ranks = 1;
  int64_t micro_batch = 1;
  int64_t accumulation = 1;
  int64_t tensor_ranks = 1;
  int64_t pipe_ranks = 1;
  int64_t stage = 0;
  std::string dtype = "fp32";  // of the parameters in forward and backward

  int64_t ranks() const { return data_ranks * tensor_ranks * pipe_ranks; }
};

struct RecordedStep {
  std::vector<std::vector<double>> losses;  // by data-parallel rank, of each micro-batch; NaN: not known
  std::optional<double> loss;               // the mean over all of them, or over their tokens
  std::optional<double> norm;
  bool applied = true;
  bool draws = false;   // whether a rank has drawn random numbers up to here
  int64_t batches = 0;  // tensors of its batches that were written down or read, up to here
};

// A tensor of float32 or float64 numbers in a file.
struct RecordedTensor {
  const void* data = nullptr;
  size_t count = 0;
  bool is_double = false;

  double operator[](size_t i) const {
    return is_double ? static_cast<const double*>(data)[i] : static_cast<double>(static_cast<const float*>(data)[i]);
  }
};

// The tensors of one step, in files of the safetensors format, which it keeps open.
class RecordedTensors {
 public:
  // Throws IoError, naming the file, for one that is missing or damaged.
  explicit RecordedTensors(const std::vector<std::string>& paths);

  const std::map<std::string, RecordedTensor>& all() const { return tensors_; }
  const RecordedTensor* find(const std::string& name) const;

 private:
  void read(const std::string& path);

  std::vector<MappedFile> files_;
  std::map<std::string, RecordedTensor> tensors_;
};

struct RecordedRun {
  std::string folder;
  RecordedLayout layout;
  int64_t pipe_ranks = 1;           // that have written; the run on one rank has the layout of the other
  std::vector<RecordedStep> steps;  // the first one is step 1

  RecordedTensors tensors(size_t step) const;  // 0: the weights at the start
  bool draws() const { return !steps.empty() && steps.back().draws; }
  bool has_batches() const { return !steps.empty() && steps.back().batches > 0; }
};

// Reads the layout of the run that has written to `folder`. Throws IoError where there is none, or it is damaged.
RecordedLayout read_layout(const std::string& folder);

// Reads the record in `folder`. `layout`: that of the run whose batches this one has taken on one rank; empty: the run
// has written its own. Throws IoError for a record that is none, or in which a rank has fewer steps than others.
RecordedRun read_run(const std::string& folder, const std::optional<RecordedLayout>& layout = std::nullopt);

// The folder of the records of the runs that are compared.
class RecordFolder {
 public:
  // Makes the folder `wanted`, which has to be empty and stays, or, where the name is empty, a temporary one that is
  // removed at the end. Throws ConfigError for a folder with files, else IoError or std::filesystem::filesystem_error.
  explicit RecordFolder(const std::string& wanted = {});
  RecordFolder(const RecordFolder&) = delete;
  RecordFolder& operator=(const RecordFolder&) = delete;
  ~RecordFolder();

  std::string of_run() const { return path_ + "/layout"; }
  std::string of_other_order() const { return path_ + "/other_order"; }
  std::string of_reference() const { return path_ + "/one_rank"; }

 private:
  std::string path_;
  bool stays_;
};

}  // namespace ds
