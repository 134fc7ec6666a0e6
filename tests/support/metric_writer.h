// Files of a metric in the format of DeepSpeed's DataAnalyzer, stated by itself.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace ds::test {

// The code that DeepSpeed's indexed_dataset.py gives an integer type.
template <class T>
constexpr uint8_t dtype_code() {
  if constexpr (std::is_same_v<T, uint8_t>) return 1;
  if constexpr (std::is_same_v<T, int8_t>) return 2;
  if constexpr (std::is_same_v<T, int16_t>) return 3;
  if constexpr (std::is_same_v<T, int32_t>) return 4;
  if constexpr (std::is_same_v<T, int64_t>) return 5;
  if constexpr (std::is_same_v<T, uint16_t>) return 6;
  if constexpr (std::is_same_v<T, uint32_t>) return 7;
  if constexpr (std::is_same_v<T, uint64_t>) return 8;
}

template <class Number>
void append(std::string& bytes, Number value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// PATH.idx and PATH.bin. Makes folders on the way; returns the path.
template <class T>
std::string write_indexed_dataset(const std::string& path, const std::vector<std::vector<T>>& rows) {
  std::string data;
  std::string sizes;
  std::string begins;
  for (const std::vector<T>& row : rows) {
    append(sizes, static_cast<int32_t>(row.size()));
    append(begins, static_cast<int64_t>(data.size()));
    for (const T element : row) append(data, element);
  }
  std::string index("MMIDIDX\0\0", 9);
  append(index, uint64_t{1});
  append(index, dtype_code<T>());
  append(index, static_cast<uint64_t>(rows.size()));
  append(index, uint64_t{2});  // documents
  index += sizes + begins;
  append(index, int64_t{0});
  append(index, static_cast<int64_t>(rows.size()));
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path + ".idx", std::ios::binary) << index;
  std::ofstream(path + ".bin", std::ios::binary) << data;
  return path;
}

struct MetricPaths {
  std::string index_to_sample;
  std::string index_to_metric;
};

// Writes the files of a metric whose value for sample i is values[i].
inline MetricPaths write_metric(const std::string& folder, const std::string& name,
                                const std::vector<int64_t>& values) {
  std::map<int64_t, std::vector<uint32_t>> samples;
  for (size_t i = 0; i < values.size(); ++i) samples[values[i]].push_back(static_cast<uint32_t>(i));
  std::vector<std::vector<uint32_t>> rows;
  std::vector<std::vector<int32_t>> row_values;
  for (const auto& [value, row] : samples) {
    rows.push_back(row);
    row_values.push_back({static_cast<int32_t>(value)});
  }
  const std::string start = folder + "/" + name + "/" + name;
  return {write_indexed_dataset(start + "_index_to_sample", rows),
          write_indexed_dataset(start + "_index_to_metric", row_values)};
}

}  // namespace ds::test
