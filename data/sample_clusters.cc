#include "data/sample_clusters.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"

namespace ds::efficiency {

SampleClusters::SampleClusters(int64_t dataset_size, std::shared_ptr<const std::vector<MetricFiles>> metrics)
    : dataset_size_(dataset_size), metrics_(std::move(metrics)), ends_(metrics_->size(), 0) {
  const size_t count = metrics_->size();
  require<ConfigError>(count < 2 || dataset_size_ <= std::numeric_limits<uint32_t>::max(),
                       "data_efficiency.data_sampling: expected at most 2^32 samples where several metrics choose ",
                       "them, found ", dataset_size_);
  require<ConfigError>(count <= std::numeric_limits<uint8_t>::max(),
                       "data_efficiency.data_sampling: expected at most 255 metrics, found ", count);
  if (count > 1) admitters_.assign(static_cast<size_t>(dataset_size_), 0);
}

bool SampleClusters::grow(const std::vector<int64_t>& difficulties) {
  ensure(difficulties.size() == metrics_->size(), "a difficulty for each metric");
  std::vector<int64_t> ends;
  for (size_t m = 0; m < metrics_->size(); ++m) ends.push_back((*metrics_)[m].admitted(difficulties[m]));
  const int64_t begin = admitted_;
  if (metrics_->size() > 1) {
    add_common(ends);
  } else {
    admitted_ = metrics_->empty() ? dataset_size_ : ends[0];
  }
  ends_ = std::move(ends);
  ensure(admitted_ >= begin, "difficulties do not fall");
  if (admitted_ == begin) return false;
  begins_.push_back(begin);
  sizes_.push_back(admitted_ - begin);
  return true;
}

// In the order of their numbers, however many growths it took until the last metric admitted them: so clusters that are
// made again from the difficulties of those that a run had are the same.
void SampleClusters::add_common(const std::vector<int64_t>& ends) {
  for (size_t m = 0; m < metrics_->size(); ++m) {
    for (int64_t place = ends_[m]; place < ends[m]; ++place) {
      const int64_t sample = (*metrics_)[m].sample(place);
      if (++admitters_[static_cast<size_t>(sample)] < metrics_->size()) continue;
      table_.push_back(static_cast<uint32_t>(sample));
    }
  }
  std::sort(table_.begin() + admitted_, table_.end());
  admitted_ = static_cast<int64_t>(table_.size());
}

int64_t SampleClusters::sample(size_t cluster, int64_t place) const {
  const int64_t at = begins_[cluster] + place;
  if (metrics_->empty()) return at;
  return metrics_->size() == 1 ? (*metrics_)[0].sample(at) : table_[static_cast<size_t>(at)];
}

}  // namespace ds::efficiency
