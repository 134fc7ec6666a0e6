#include "config/split/logical_cut.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/check.h"

namespace ds::engine {
namespace {

using config::LogicalSize;
using Sizes = std::vector<int64_t>;

int64_t product(Sizes::const_iterator begin, Sizes::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += cat(text.empty() ? "[" : ", ", size);
  return text + "]";
}

// With numbers in place of -1. A number at the dimension that is cut counts parts, and says nothing of their size.
// Empty: the weight is no such shape.
Sizes resolved(const std::vector<LogicalSize>& shape, size_t dim, const Sizes& sizes) {
  Sizes logical;
  std::vector<size_t> unknown;
  for (size_t i = 0; i < shape.size(); ++i) {
    int64_t size = i == dim ? -1 : shape[i].size;
    if (!shape[i].parts.empty()) size = std::accumulate(shape[i].parts.begin(), shape[i].parts.end(), int64_t{0});
    if (size < 0) unknown.push_back(i);
    logical.push_back(size);
  }
  const int64_t total = product(sizes.begin(), sizes.end());
  if (unknown.size() == 1) {
    logical[unknown[0]] = 1;
    const int64_t known = product(logical.begin(), logical.end());
    if (known == 0 || total % known != 0) return {};
    logical[unknown[0]] = total / known;
  } else if (unknown.size() > 1) {
    if (shape.size() != sizes.size()) return {};
    for (const size_t i : unknown) logical[i] = sizes[i];
  }
  if (product(logical.begin(), logical.end()) != total) return {};
  return logical;
}

}  // namespace

LogicalCut logical_cut(const config::LayerPartition& spec, const Sizes& sizes, const std::string& name,
                       const std::string& path) {
  const bool row = spec.type == config::PartitionType::kRow;
  const auto dim = static_cast<size_t>(spec.partition_dim.value_or(row ? 1 : 0));
  if (spec.shape.empty()) {
    require<ConfigError>(dim < sizes.size(), path, ".partition_dim: ", dim, " is no dimension of ", name, " ",
                         text_of(sizes));
    return {.dim = static_cast<int64_t>(dim), .blocks = {}};
  }
  const auto wrong = [&](const std::string& why) {
    throw ConfigError(cat(path, ".shape: is no shape of ", name, " ", text_of(sizes), ": ", why));
  };
  const Sizes logical = resolved(spec.shape, dim, sizes);
  if (logical.empty()) wrong("the numbers of elements differ");
  const LogicalSize& cut = spec.shape[dim];
  constexpr int64_t kMostBlocks = int64_t{1} << 20;  // as a checkpoint's
  const int64_t listed = std::max<int64_t>(static_cast<int64_t>(cut.parts.size()), cut.size);
  if (listed > kMostBlocks) wrong(cat("expected up to ", kMostBlocks, " blocks, found ", listed));
  Sizes parts = cut.parts;
  if (parts.empty() && cut.size > 0) {
    if (logical[dim] % cut.size != 0) wrong(cat(logical[dim], " does not divide by ", cut.size));
    parts.assign(static_cast<size_t>(cut.size), logical[dim] / cut.size);
  }
  if (logical == sizes || dim + 1 == logical.size()) {
    if (logical.back() != sizes.back()) wrong(cat("expected ", sizes.back(), " as its last size"));
    const int64_t same = logical == sizes ? static_cast<int64_t>(dim) : static_cast<int64_t>(sizes.size()) - 1;
    if (parts.size() == 1) parts.clear();
    return {.dim = same, .blocks = parts};
  }
  // The first dimension, seen as several.
  if (logical.back() != sizes.back() || product(logical.begin(), logical.end() - 1) != sizes[0]) {
    wrong(cat("expected sizes whose last is ", sizes.back(), " and whose others make ", sizes[0]));
  }
  if (parts.empty()) parts = {logical[dim]};
  const auto at = logical.begin() + static_cast<int64_t>(dim);
  const int64_t outer = product(logical.begin(), at);
  const int64_t inner = product(at + 1, logical.end() - 1);
  if (inner <= 0 || outer > kMostBlocks / static_cast<int64_t>(parts.size())) {
    wrong(cat("expected up to ", kMostBlocks, " blocks that are not empty"));
  }
  LogicalCut result{.dim = 0, .blocks = {}, .grain = inner};
  for (int64_t repeat = 0; repeat < outer; ++repeat) {
    for (const int64_t part : parts) result.blocks.push_back(part * inner);
  }
  if (result.blocks.size() == 1) result.blocks.clear();
  return result;
}

}  // namespace ds::engine
