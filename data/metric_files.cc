#include "data/metric_files.h"

#include <algorithm>
#include <vector>

#include "core/check.h"

namespace ds::efficiency {
namespace {

// An error in a file is one of the key that names it.
template <class Make>
auto of_key(const SampleMetric& metric, const char* key, const Make& make) {
  try {
    return make();
  } catch (const IoError& error) {
    throw IoError(cat("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.", metric.name, ".", key,
                      ": ", error.what()));
  }
}

IndexedDataset open(const SampleMetric& metric, const char* key, const std::string& path) {
  return of_key(metric, key, [&] { return IndexedDataset(path); });
}

constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ULL;  // odd: multiplication loses nothing

}  // namespace

MetricFiles::MetricFiles(const SampleMetric& metric, int64_t dataset_size)
    : name_(metric.name),
      samples_(open(metric, "index_to_sample_path", metric.index_to_sample_path)),
      max_difficulty_(metric.schedule.max_difficulty) {
  if (metric.by_percentile) digest_ = static_cast<uint64_t>(max_difficulty_);
  if (!metric.by_percentile) values_ = open(metric, "index_to_metric_path", metric.index_to_metric_path);
  of_key(metric, "index_to_metric_path", [this] { check_values(); });
  of_key(metric, "index_to_sample_path", [this, dataset_size] { check_samples(dataset_size); });
}

void MetricFiles::check_values() {
  if (!values_) return;
  require<IoError>(values_->rows() == samples_.rows(), values_->path(), ".idx: expected a row for each of the ",
                   samples_.rows(), " of ", samples_.path(), ", found ", values_->rows());
  for (int64_t row = 0; row < values_->rows(); ++row) {
    require<IoError>(values_->begin_of(row) == row && values_->begin_of(row + 1) == row + 1, values_->path(),
                     ".idx: expected one value in row ", row, ", found ",
                     values_->begin_of(row + 1) - values_->begin_of(row));
    const int64_t value = values_->element(row);
    require<IoError>(row == 0 || values_->element(row - 1) < value, values_->path(),
                     ".bin: expected values that grow from row to row, found ", value, " in row ", row, " behind ",
                     row == 0 ? value : values_->element(row - 1));
    digest_ = (digest_ ^ static_cast<uint64_t>(value)) * kFactor;
    digest_ = (digest_ ^ static_cast<uint64_t>(samples_.begin_of(row))) * kFactor;
  }
}

void MetricFiles::check_samples(int64_t dataset_size) {
  std::vector<bool> seen(static_cast<size_t>(dataset_size));
  for (int64_t place = 0; place < size(); ++place) {
    const int64_t number = sample(place);
    require<IoError>(number >= 0 && number < dataset_size, samples_.path(), ".bin: element ", place, " is sample ",
                     number, ", expected one of the ", dataset_size,
                     " samples of the training data; was another dataset analysed?");
    require<IoError>(!seen[static_cast<size_t>(number)], samples_.path(), ".bin: expected each sample once, found ",
                     number, " again at element ", place);
    seen[static_cast<size_t>(number)] = true;
    digest_ = (digest_ ^ static_cast<uint64_t>(number)) * kFactor;
  }
  require<IoError>(size() > 0, samples_.path(), ".idx: expected samples, found none");
}

int64_t MetricFiles::admitted(int64_t difficulty) const {
  if (!values_) {
    if (difficulty >= max_difficulty_) return size();
    return size() / max_difficulty_ * std::max<int64_t>(difficulty, 0);
  }
  int64_t low = 0;
  int64_t high = values_->rows();
  while (low < high) {  // rows before `low` are admitted, those from `high` on are not
    const int64_t middle = low + (high - low) / 2;
    if (values_->element(middle) <= difficulty) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return samples_.begin_of(low);
}

std::string MetricFiles::least() const {
  return values_ ? cat("value ", values_->element(0)) : cat("percentile 1 of ", max_difficulty_);
}

}  // namespace ds::efficiency
