#include "data/sample_metrics.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/atomic_file.h"

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

namespace {

// A type of integers: its code in DeepSpeed's indexed_dataset.py, and its bytes.
struct ElementType {
  uint8_t code;
  size_t bytes;
};

// Chooses the type as DeepSpeed's find_fit_int_dtype does.
ElementType fitting_type(int64_t least, int64_t most) {
  const auto fits = [least, most]<class T>(T) { return std::in_range<T>(least) && std::in_range<T>(most); };
  if (fits(uint8_t{})) return {1, 1};
  if (fits(uint16_t{})) return {6, 2};
  if (fits(uint32_t{})) return {7, 4};
  if (least >= 0) return {8, 8};
  if (fits(int8_t{})) return {2, 1};
  if (fits(int16_t{})) return {3, 2};
  if (fits(int32_t{})) return {4, 4};
  return {5, 8};
}

template <class Number>
void append(std::string& bytes, Number value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Row r has sizes[r] of the elements.
void write_rows(const std::string& path, ElementType type, const std::vector<int64_t>& elements,
                const std::vector<int64_t>& sizes) {
  std::string data(elements.size() * type.bytes, '\0');
  for (size_t i = 0; i < elements.size(); ++i) {
    std::memcpy(data.data() + i * type.bytes, &elements[i], type.bytes);  // little-endian: the low bytes come first
  }
  std::string index("MMIDIDX\0\0", 9);
  append(index, uint64_t{1});
  append(index, type.code);
  append(index, static_cast<uint64_t>(sizes.size()));
  append(index, uint64_t{2});  // places of documents: the beginning and the end of the only one
  for (const int64_t size : sizes) append(index, static_cast<int32_t>(size));
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    append(index, begin);
    begin += size * static_cast<int64_t>(type.bytes);
  }
  append(index, int64_t{0});
  append(index, static_cast<int64_t>(sizes.size()));
  write_whole_file(path + ".bin", data, /*durable=*/false);
  write_whole_file(path + ".idx", index, /*durable=*/false);
}

}  // namespace

void write_metric(const std::string& folder, const std::string& name, const std::vector<int64_t>& values) {
  require(!values.empty(), "metric ", name, ": expected values of samples, found none");
  std::vector<int64_t> samples(values.size());
  std::iota(samples.begin(), samples.end(), 0);
  std::stable_sort(samples.begin(), samples.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] < values[static_cast<size_t>(b)];
  });
  std::vector<int64_t> distinct;
  std::vector<int64_t> sizes;
  for (const int64_t sample : samples) {
    const int64_t value = values[static_cast<size_t>(sample)];
    if (distinct.empty() || distinct.back() != value) {
      distinct.push_back(value);
      sizes.push_back(0);
    }
    ++sizes.back();
  }
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  require(most <= std::numeric_limits<int32_t>::max(), "metric ", name, ": expected at most 2^31 - 1 samples of one ",
          "value, found ", most);
  const std::filesystem::path own = std::filesystem::path(folder) / name;
  std::error_code error;
  std::filesystem::create_directories(own, error);
  require<IoError>(!error, own.string(), ": cannot be made: ", error.message());
  const std::string start = (own / name).string();
  const ElementType value_type = fitting_type(distinct.front(), distinct.back());
  write_rows(start + "_index_to_sample", fitting_type(0, static_cast<int64_t>(values.size()) - 1), samples, sizes);
  write_rows(start + "_index_to_metric", value_type, distinct, std::vector<int64_t>(distinct.size(), 1));
  write_rows(start + "_sample_to_metric", value_type, values, std::vector<int64_t>(values.size(), 1));
}

TokenFile::TokenFile(const std::string& path, int bytes)
    : path_(path), file_(path), bytes_(bytes), size_(static_cast<int64_t>(file_.bytes().size()) / bytes) {
  require(bytes == 1 || bytes == 2 || bytes == 4, "tokens: expected 1, 2 or 4 bytes each, found ", bytes);
  require<IoError>(file_.bytes().size() % static_cast<size_t>(bytes) == 0, path, ": expected tokens of ", bytes,
                   " bytes, found ", file_.bytes().size(), " bytes");
}

uint32_t TokenFile::token(int64_t place) const {
  uint32_t token = 0;
  std::memcpy(&token, file_.bytes().data() + place * bytes_, static_cast<size_t>(bytes_));
  return token;
}

void TokenFile::cut_by_length(int64_t length) {
  require(length > 0, "samples: expected a length > 0, found ", length);
  require<ConfigError>(size_ > length, path_, ": expected at least ", length, " tokens and one that follows, found ",
                       size_);
  begins_.clear();
  for (int64_t begin = 0; begin < size_ - length; begin += length) begins_.push_back(begin);
  lengths_.assign(begins_.size(), length);
}

void TokenFile::cut_at(uint32_t separator) {
  begins_.clear();
  lengths_.clear();
  int64_t begin = 0;
  for (int64_t place = 0; place <= size_; ++place) {
    if (place < size_ && token(place) != separator) continue;
    if (place > begin) {
      begins_.push_back(begin);
      lengths_.push_back(place - begin);
    }
    begin = place + 1;
  }
  require<ConfigError>(!begins_.empty(), path_, ": expected tokens between those that separate samples, found none");
}

std::vector<int64_t> TokenFile::vocabulary_rarity() const {
  std::unordered_map<uint32_t, double> rarity;
  for (int64_t place = 0; place < size_; ++place) rarity[token(place)] += 1;
  for (auto& [token, value] : rarity) value = -std::log(value / static_cast<double>(size_));
  std::vector<int64_t> result;
  for (size_t i = 0; i < begins_.size(); ++i) {
    double sum = 0;
    for (int64_t place = begins_[i]; place < begins_[i] + lengths_[i]; ++place) sum += rarity.at(token(place));
    result.push_back(static_cast<int64_t>(sum));
  }
  return result;
}

}  // namespace ds::efficiency
