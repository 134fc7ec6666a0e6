#include "tools/checkpoint/commands.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/source/tensor_parts.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "tools/checkpoint/text_columns.h"

namespace ds::checkpoint::tool {
namespace {

using nlohmann::json;

struct Difference {
  bool bits = true;  // equal
  double absolute = 0;
  double relative = 0;
};

struct Comparison {
  std::vector<std::string> only_a, only_b;
  std::vector<std::vector<std::string>> shapes, dtypes, values;
  int64_t compared = 0, bit_equal = 0, within = 0, different = 0;
};

bool compared_at_all(const std::string& path, const DiffOptions& options) {
  return !options.weights_only || path.starts_with("weights/") || path.starts_with("buffers/");
}

// Where `source` has what the other calls `path`: under another name of a tied parameter, or, as files of weights do
// not tell them apart, a buffer among weights. Empty: nowhere.
std::string counterpart(const Source& source, const std::string& path) {
  if (source.contains(path)) return path;
  const std::string weight = name_in("weights/", path);
  const std::string buffer = name_in("buffers/", path);
  if (!buffer.empty()) return source.contains(weight_path(buffer)) ? weight_path(buffer) : std::string();
  if (weight.empty()) return {};
  if (source.contains(buffer_path(weight))) return buffer_path(weight);
  const auto alias = source.aliases().find(weight);
  return alias == source.aliases().end() ? std::string() : weight_path(alias->second);
}

// Not a number on both sides counts as equal, on one as an infinite difference.
void add_values(const at::Tensor& a, const at::Tensor& b, Difference& difference) {
  const at::Tensor x = a.to(at::kDouble);
  const at::Tensor y = b.to(at::kDouble);
  const at::Tensor both = at::isnan(x).logical_and(at::isnan(y)).logical_or(x == y);
  at::Tensor absolute = (x - y).abs().masked_fill(both, 0.0);
  absolute = absolute.masked_fill(absolute.isnan(), std::numeric_limits<double>::infinity());
  const at::Tensor magnitude = at::maximum(x.abs(), y.abs());
  at::Tensor relative = (absolute / magnitude).masked_fill(both, 0.0);
  relative = relative.masked_fill(relative.isnan(), std::numeric_limits<double>::infinity());
  difference.absolute = std::max(difference.absolute, absolute.max().item<double>());
  difference.relative = std::max(difference.relative, relative.max().item<double>());
}

Difference difference_of(Source& a, const std::string& path_a, Source& b, const std::string& path_b) {
  Difference difference;
  const at::ScalarType dtype = b.info(path_b).dtype;
  difference.bits = dtype == a.info(path_a).dtype;
  int64_t offset = 0;
  for_each_part(a, path_a, [&](const at::Tensor& part) {
    const at::Tensor other = at::empty(part.sizes(), dtype);
    b.read(path_b, offset, other);
    offset += part.numel();
    const bool same =
        dtype == part.scalar_type() && std::memcmp(part.const_data_ptr(), other.const_data_ptr(), part.nbytes()) == 0;
    if (same) return;
    difference.bits = false;
    add_values(part, other, difference);
  });
  return difference;
}

std::string shape_text(const TensorInfo& info) { return cat(at::IntArrayRef(info.sizes)); }

void compare_tensor(Source& a, const std::string& path, Source& b, const std::string& other, const DiffOptions& options,
                    Comparison& result) {
  const TensorInfo& info_a = a.info(path);
  const TensorInfo& info_b = b.info(other);
  if (info_a.sizes != info_b.sizes) {
    result.shapes.push_back({path, shape_text(info_a), shape_text(info_b)});
    return;
  }
  if (info_a.dtype != info_b.dtype) {
    result.dtypes.push_back({path, c10::toString(info_a.dtype), c10::toString(info_b.dtype)});
  }
  const Difference difference = difference_of(a, path, b, other);
  ++result.compared;
  if (difference.bits) {
    ++result.bit_equal;
    return;
  }
  const bool within = difference.absolute <= options.tolerance;
  ++(within ? result.within : result.different);
  if (difference.absolute == 0) return;
  result.values.push_back(
      {path, json(difference.absolute).dump(), json(difference.relative).dump(), within ? "within tolerance" : ""});
  // JSON has no infinity.
  if (difference.absolute == std::numeric_limits<double>::infinity()) result.values.back()[1] = "inf";
  if (difference.relative == std::numeric_limits<double>::infinity()) result.values.back()[2] = "inf";
}

Comparison compare_tensors(Source& a, Source& b, const DiffOptions& options) {
  Comparison result;
  std::set<std::string> met;  // of b
  for (const auto& [path, info] : a.tensors()) {
    if (!compared_at_all(path, options)) continue;
    const std::string other = counterpart(b, path);
    if (other.empty()) {
      result.only_a.push_back(path);
    } else {
      met.insert(other);
      compare_tensor(a, path, b, other, options, result);
    }
  }
  for (const auto& [path, info] : b.tensors()) {
    if (!compared_at_all(path, options) || met.contains(path)) continue;
    const std::string other = counterpart(a, path);
    if (other.empty()) {
      result.only_b.push_back(path);
    } else {
      compare_tensor(a, other, b, path, options, result);
    }
  }
  return result;
}

// key, a, b of each difference.
std::vector<std::vector<std::string>> state_differences(const json& a, const json& b) {
  const json flat_a = a.flatten();
  const json flat_b = b.flatten();
  std::vector<std::vector<std::string>> rows;
  std::set<std::string> keys;
  for (const json* side : {&flat_a, &flat_b}) {
    for (const auto& [key, value] : side->items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const json value_a = flat_a.value(key, json("absent"));
    const json value_b = flat_b.value(key, json("absent"));
    if (value_a != value_b) rows.push_back({key.empty() ? "all" : key.substr(1), value_a.dump(), value_b.dump()});
  }
  return rows;
}

// Takes out the entries that describe the run, and leaves those that say where training stands.
json take_layout(json& state) {
  json layout = json::object();
  for (const char* key :
       {"world_size", "pipeline_stages", "tensor_ranks", "zero_stage", "config", "run", "keep_last_tag"}) {
    if (!state.contains(key)) continue;
    layout[key] = state[key];
    state.erase(key);
  }
  return layout;
}

void print_section(const char* title, const std::vector<std::vector<std::string>>& rows, std::ostream& out) {
  if (rows.empty()) return;
  out << title << '\n';
  print_columns(rows, out);
}

void print_names(const std::string& title, const std::vector<std::string>& names, std::ostream& out) {
  if (names.empty()) return;
  out << title << " (" << names.size() << ")\n";
  for (const std::string& name : names) out << "  " << name << '\n';
}

bool print_states(const Source& a, const Source& b, std::ostream& out) {
  json state_a = to_json(a.state());
  json state_b = to_json(b.state());
  const json layout_a = take_layout(state_a);
  const json layout_b = take_layout(state_b);
  const auto differences = state_differences(state_a, state_b);
  print_section("Training state: A, B", differences, out);
  print_section("Not counted: A, B", state_differences(layout_a, layout_b), out);
  return differences.empty();
}

}  // namespace

bool diff(Source& a, Source& b, const DiffOptions& options, std::ostream& out) {
  out << "A: " << a.location() << "\nB: " << b.location() << '\n';
  const Comparison result = compare_tensors(a, b, options);
  print_names("Only in A", result.only_a, out);
  print_names("Only in B", result.only_b, out);
  print_section("Shapes: A, B", result.shapes, out);
  print_section("Dtypes: A, B", result.dtypes, out);
  print_section("Values: largest absolute, relative difference", result.values, out);
  const bool same_state = options.weights_only || print_states(a, b, out);
  out << result.compared << " tensors compared: " << result.bit_equal << " bit-equal, " << result.within
      << " equal within " << json(options.tolerance).dump() << ", " << result.different << " different\n";
  const bool equal =
      result.only_a.empty() && result.only_b.empty() && result.shapes.empty() && result.different == 0 && same_state;
  out << (equal ? "equal\n" : "different\n");
  return equal;
}

}  // namespace ds::checkpoint::tool
