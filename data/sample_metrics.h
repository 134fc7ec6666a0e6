// Metrics of the samples of a dataset: computing them from tokens, writing and reading them as files of DeepSpeed's
// DataAnalyzer, and the clusters of samples that a curriculum admits by them. Torch-free.
//
// A file has the samples in the order of one metric: row r of <metric>_index_to_sample is the samples of the r-th least
// value, row r of <metric>_index_to_metric is that value. A difficulty admits the first samples of the order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/files/mapped_file.h"
#include "data/indexed_dataset.h"
#include "dsengine/difficulty_schedule.h"

namespace ds::efficiency {

// The files of one metric, opened. May be used from any thread.
class MetricFiles {
 public:
  // Opens the files of a metric that chooses samples. Reads all of them once: each sample is a number below
  // `dataset_size` and there at most once, values grow from row to row. Throws IoError that begins with the key of the
  // config and names the file.
  MetricFiles(const SampleMetric& metric, int64_t dataset_size);

  const std::string& name() const { return name_; }
  int64_t size() const { return samples_.elements(); }
  // Returns the sample at a place of the order, from 0.
  int64_t sample(int64_t place) const { return samples_.element(place); }
  // Returns how many samples a difficulty admits. By value: those of at most that value. By percentile: as DeepSpeed
  // counts, size() / max_difficulty (whole) for each, all of them at max_difficulty.
  int64_t admitted(int64_t difficulty) const;
  // The difficulty of the easiest sample, for messages: a value, or "percentile 1".
  std::string least() const;
  uint64_t digest() const { return digest_; }

 private:
  void check_values();
  void check_samples(int64_t dataset_size);

  std::string name_;
  IndexedDataset samples_;
  std::optional<IndexedDataset> values_;  // none: by percentile
  int64_t max_difficulty_;
  uint64_t digest_ = 0;
};

// The samples that a curriculum has admitted, in clusters: the samples that one growth of the difficulties has added. A
// sample is admitted where all metrics admit it, and is in one cluster.
//
// With one metric a cluster is a range of its order and takes no memory; with several, a byte for each sample of the
// dataset and four for each that is admitted. Not thread safe.
class SampleClusters {
 public:
  // `metrics` are the ones that choose samples; without any all samples are one cluster. Throws ConfigError for several
  // metrics of more than 2^32 samples.
  SampleClusters(int64_t dataset_size, std::shared_ptr<const std::vector<MetricFiles>> metrics);

  const std::vector<MetricFiles>& metrics() const { return *metrics_; }
  // Admits what is at most so difficult: one number for each metric, none below that of an earlier call. False: that
  // adds no sample, and no cluster.
  bool grow(const std::vector<int64_t>& difficulties);

  size_t count() const { return sizes_.size(); }
  int64_t size(size_t cluster) const { return sizes_[cluster]; }
  // The number of samples in all clusters.
  int64_t admitted() const { return admitted_; }
  // The sample at a place of a cluster, from 0.
  int64_t sample(size_t cluster, int64_t place) const;

 private:
  // Admits, with several metrics, the samples whose places lie between ends_ and `ends`.
  void add_common(const std::vector<int64_t>& ends);

  int64_t dataset_size_;
  std::shared_ptr<const std::vector<MetricFiles>> metrics_;
  std::vector<int64_t> ends_;       // for each metric: how many places of its order are admitted
  std::vector<int64_t> begins_;     // begin of each cluster: a place in the order of the one metric, or in table_
  std::vector<int64_t> sizes_;      // size of each cluster
  std::vector<uint8_t> admitters_;  // with several metrics: how many of them admit a sample
  std::vector<uint32_t> table_;     // with several metrics: the samples, cluster by cluster
  int64_t admitted_ = 0;
};

// Writes the files of a metric; `values[i]` is its value for sample i. Makes FOLDER/NAME/NAME_index_to_sample,
// NAME_index_to_metric and NAME_sample_to_metric, .bin and .idx, each whole or not at all, in the smallest types that
// hold the numbers; makes folders on the way. Throws IoError for a file that cannot be written, UsageError without
// values and for more than 2^31 - 1 samples of one value, which the format cannot count.
void write_metric(const std::string& folder, const std::string& name, const std::vector<int64_t>& values);

// A file of tokens, cut into samples: unsigned little-endian integers, one behind the other. Its metrics are those of
// the analyzers of DeepSpeed's examples. May be used from any thread.
class TokenFile {
 public:
  // `bytes` is the size of a token: 1, 2 or 4. Throws IoError for a file that is no whole number of them.
  TokenFile(const std::string& path, int bytes);

  int64_t size() const { return size_; }
  uint32_t token(int64_t place) const;
  // Cuts samples of `length` tokens, each with the one that follows: sample i begins at i * length.
  void cut_by_length(int64_t length);
  // Cuts samples at `separator` tokens, which belong to no sample; empty samples are left out.
  void cut_at(uint32_t separator);
  int64_t samples() const { return static_cast<int64_t>(begins_.size()); }

  // Tokens of each sample.
  std::vector<int64_t> lengths() const { return lengths_; }
  // The sum of -ln(frequency) of a sample's tokens in the whole file, rounded down: rare words make it large.
  std::vector<int64_t> vocabulary_rarity() const;

 private:
  std::string path_;
  MappedFile file_;
  int bytes_;
  int64_t size_;
  std::vector<int64_t> begins_;   // first token of each sample
  std::vector<int64_t> lengths_;  // tokens of each sample
};

}  // namespace ds::efficiency
