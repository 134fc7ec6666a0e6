#include "data/metric_writer.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/files/atomic_file.h"

namespace ds::efficiency {
namespace {

// A type of integers: its code in DeepSpeed's indexed_dataset.py, and its bytes.
struct ElementType {
  uint8_t code;
  size_t bytes;
};

// As DeepSpeed's find_fit_int_dtype chooses.
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

}  // namespace ds::efficiency
