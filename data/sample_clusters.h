// The samples that a curriculum has admitted, in clusters: those that one growth of the difficulties has added. A
// sample is admitted where all metrics admit it, and is in one cluster. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "data/metric_files.h"

namespace ds::efficiency {

// With one metric a cluster is a range of its order and takes no memory; with several, a byte for each sample of the
// dataset and four for each that is admitted. Not thread safe.
class SampleClusters {
 public:
  // `metrics`: those that choose samples; without any all samples are one cluster. Throws ConfigError for several
  // metrics of more than 2^32 samples.
  SampleClusters(int64_t dataset_size, std::shared_ptr<const std::vector<MetricFiles>> metrics);

  const std::vector<MetricFiles>& metrics() const { return *metrics_; }
  // Admits what is at most so difficult: one number for each metric, none below that of an earlier call. False: that
  // adds no sample, and no cluster.
  bool grow(const std::vector<int64_t>& difficulties);

  size_t count() const { return sizes_.size(); }
  int64_t size(size_t cluster) const { return sizes_[cluster]; }
  // Of all of them.
  int64_t admitted() const { return admitted_; }
  // The sample at a place of a cluster, from 0.
  int64_t sample(size_t cluster, int64_t place) const;

 private:
  // Of several metrics: takes over what lies between ends_ and `ends`.
  void add_common(const std::vector<int64_t>& ends);

  int64_t dataset_size_;
  std::shared_ptr<const std::vector<MetricFiles>> metrics_;
  std::vector<int64_t> ends_;       // for each metric: how many places of its order are admitted
  std::vector<int64_t> begins_;     // of clusters: a place in the order of the one metric, or in table_
  std::vector<int64_t> sizes_;      // of clusters
  std::vector<uint8_t> admitters_;  // of several metrics: how many of them admit a sample
  std::vector<uint32_t> table_;     // of several metrics: the samples, cluster by cluster
  int64_t admitted_ = 0;
};

}  // namespace ds::efficiency
