#include "tools/split_parameters.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "config/split/layer_names.h"
#include "config/split/rules_from_names.h"
#include "config/split/split_rules.h"
#include "core/check.h"
#include "core/json/json_depth.h"
#include "core/shown_text.h"
#include "core/split/tensor_part.h"
#include "core/text.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

using nlohmann::ordered_json;
using parallel::ParameterSplit;
using parallel::Style;

int64_t product(const std::vector<int64_t>& sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes) result *= size;
  return result;
}

std::string joined(const std::vector<int64_t>& numbers) {
  constexpr size_t kMostShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(numbers.size(), kMostShown); ++i) text += cat(text.empty() ? "" : ", ", numbers[i]);
  return numbers.size() > kMostShown ? cat(text, ", ... (", numbers.size(), ")") : text;
}

std::string cut_text(const ParameterSplit& split) {
  if (!split.is_split()) return "whole";
  std::string text = cat("dimension ", split.dim);
  if (!split.blocks.empty()) text += cat(" in blocks of ", joined(split.blocks));
  if (split.grain > 1) text += cat(" by ", split.grain);
  return text;
}

// Without what the cut says: "dimension 0 over 2 ranks: row, by its name".
std::string reason_text(const ParameterSplit& split) {
  const size_t colon = split.reason.find(": ");
  return colon == std::string::npos ? split.reason : split.reason.substr(colon + 2);
}

// Where a group is in the report.
using GroupKey = std::tuple<std::string, std::vector<int64_t>, std::string, std::string>;

void add_to_groups(const ParameterSplit& split, std::vector<SplitGroup>& groups, std::map<GroupKey, size_t>& places) {
  SplitGroup group{.names = engine::without_numbers(split.name),
                   .count = 1,
                   .sizes = split.sizes,
                   .cut = cut_text(split),
                   .reason = reason_text(split)};
  const auto [place, is_new] = places.try_emplace({group.names, group.sizes, group.cut, group.reason}, groups.size());
  if (is_new) {
    groups.push_back(std::move(group));
  } else {
    ++groups[place->second].count;
  }
}

// A row layer adds up what it puts out, forward, and the column layers before it what they read, backward; both are of
// one width. The embedding adds up forward, the head backward: one matrix is both, tied.
void add_traffic(const parallel::SplitPlan& plan, SplitReport& report) {
  const double share = 2 * static_cast<double>(report.ranks - 1) / static_cast<double>(report.ranks);
  double rows = 0;
  double vocabulary = 0;
  int64_t vocabularies = 0;
  for (const ParameterSplit& split : plan) {
    if (!split.is_split() || split.sizes.size() != 2) continue;
    const auto width = static_cast<double>(split.sizes[static_cast<size_t>(1 - split.dim)]);
    if (split.style == Style::kRow) rows += 2 * width;
    if (split.style == Style::kVocabulary) {
      vocabulary += width;
      ++vocabularies;
    }
  }
  constexpr int64_t kLossBytes = 12;  // the largest score, the sum, the target's score
  report.sent_elements_per_token = share * (rows + (vocabularies == 1 ? 2 : 1) * vocabulary);
  if (vocabularies > 0) report.sent_loss_bytes_per_token = share * kLossBytes;
}

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using parallel::NamedShape;

constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr size_t kLongestText = size_t{16} << 20;
constexpr size_t kMostParametersByName = 1'000'000;
constexpr size_t kLongestName = 1000;  // std::regex recurses for each letter

std::vector<int64_t> sizes_of(const ordered_json& json, const std::string& path, const std::string& name) {
  bool fits = json.is_array();
  std::vector<int64_t> sizes;
  double product = 1;
  for (const ordered_json& size : json) {
    fits = fits && size.is_number_integer() && size.get<int64_t>() >= 0 && size.get<int64_t>() <= kMostWidth;
    if (!fits) break;
    sizes.push_back(size.get<int64_t>());
    product *= static_cast<double>(sizes.back());
  }
  require<IoError>(fits && product <= static_cast<double>(kMostParameters), path, ": '", shown_text(name),
                   "': expected a list of sizes, found ", shown_text(json.dump()));
  return sizes;
}

ordered_json parsed(const std::string& text, const std::string& path) {
  auto json = parse_shallow_json<ordered_json>(text);
  require<IoError>(json.is_object(), path, ": expected a safetensors file, or a JSON object {\"name\": [sizes], ...}");
  return json;
}

// The header behind its length; empty: the file does not begin as one.
std::string safetensors_header(std::ifstream& in, const std::string& path) {
  std::array<unsigned char, 8> bytes{};
  if (!in.read(reinterpret_cast<char*>(bytes.data()), bytes.size())) return {};
  uint64_t length = 0;
  for (size_t i = bytes.size(); i > 0; --i) length = length << 8 | bytes[i - 1];
  if (length < 2 || length > kLongestHeader) return {};
  std::string header(length, '\0');
  in.read(header.data(), static_cast<std::streamsize>(length));
  require<IoError>(static_cast<uint64_t>(in.gcount()) == length, path, ": the header of ", length,
                   " bytes is cut off; the file is not complete");
  return header;
}

void read_file(const fs::path& path, std::vector<NamedShape>& shapes) {
  auto in = classic_stream<std::ifstream>(path, std::ios::binary);
  require<IoError>(in.good(), path.string(), ": cannot be opened");
  const std::string header = safetensors_header(in, path.string());
  if (!header.empty()) {
    const ordered_json entries = parsed(header, path.string());
    for (const auto& entry : entries.items()) {
      if (entry.key() == "__metadata__") continue;
      const ordered_json& tensor = entry.value();
      require<IoError>(tensor.is_object() && tensor.contains("shape"), path.string(), ": '", shown_text(entry.key()),
                       "': expected an entry with a shape");
      shapes.push_back({.name = entry.key(), .sizes = sizes_of(tensor["shape"], path.string(), entry.key())});
    }
    return;
  }
  in.clear();
  in.seekg(0);
  std::string text(kLongestText + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  require<IoError>(text.size() <= kLongestText, path.string(), ": expected a safetensors file, or JSON of up to ",
                   kLongestText, " bytes, found another file that is longer");
  const ordered_json entries = parsed(text, path.string());
  for (const auto& entry : entries.items()) {
    shapes.push_back({.name = entry.key(), .sizes = sizes_of(entry.value(), path.string(), entry.key())});
  }
}

std::vector<fs::path> files_at(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  require<IoError>(!error && !files.empty(), path, ": expected a folder with .safetensors files, found none");
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

SplitReport report_splits(const engine::config::TensorParallelSection& section,
                          const std::vector<parallel::NamedShape>& parameters) {
  SplitReport report{.ranks = section.size(), .groups = {}, .warnings = {}};
  engine::SplitRules split = engine::split_rules(section, parameters);
  report.warnings = std::move(split.warnings);
  const int ranks = static_cast<int>(report.ranks);
  const parallel::SplitPlan plan = parallel::plan_splits(parameters, split.rules, ranks);
  const bool cuts = std::any_of(plan.begin(), plan.end(), [](const ParameterSplit& one) { return one.is_split(); });
  if (!cuts && !plan.empty()) report.warnings.push_back(engine::nothing_is_split(report.ranks));
  std::map<GroupKey, size_t> places;
  for (const ParameterSplit& entry : plan) {
    add_to_groups(entry, report.groups, places);
    const int64_t whole = product(entry.sizes);
    report.model_elements += whole;
    if (!entry.is_split()) {
      report.rank_elements += whole;
      continue;
    }
    // Where parts are uneven the first rank has most.
    const Cut cut{.dim = entry.dim, .blocks = entry.blocks, .grain = entry.grain};
    const int64_t part = TensorPart(entry.sizes, cut, 0, ranks).numel();
    report.rank_elements += part;
    report.part_elements += part;
  }
  add_traffic(plan, report);
  return report;
}

ordered_json to_json(const SplitReport& report) {
  ordered_json groups = ordered_json::array();
  for (const SplitGroup& group : report.groups) {
    groups.push_back({{"names", group.names},
                      {"count", group.count},
                      {"sizes", group.sizes},
                      {"cut", group.cut},
                      {"reason", group.reason}});
  }
  return {{"ranks", report.ranks},
          {"parameters", groups},
          {"warnings", report.warnings},
          {"model_elements", report.model_elements},
          {"rank_elements", report.rank_elements},
          {"part_elements", report.part_elements},
          {"sent_elements_per_token", report.sent_elements_per_token},
          {"sent_loss_bytes_per_token", report.sent_loss_bytes_per_token}};
}

void print(const SplitReport& report, std::ostream& out) {
  size_t names = 0;
  size_t sizes = 0;
  size_t cuts = 0;
  const auto shape = [](const SplitGroup& group) {
    return cat(group.count > 1 ? cat(group.count, " x ") : "", "[", joined(group.sizes), "]");
  };
  for (const SplitGroup& group : report.groups) {
    names = std::max(names, shown_text(group.names).size());
    sizes = std::max(sizes, shape(group).size());
    cuts = std::max(cuts, group.cut.size());
  }
  const auto padded = [](const std::string& text, size_t width) {
    return text + std::string(width - text.size() + 2, ' ');
  };
  for (const SplitGroup& group : report.groups) {
    out << "  " << padded(shown_text(group.names), names) << padded(shape(group), sizes) << padded(group.cut, cuts)
        << shown_message(group.reason) << '\n';
  }
  out << "  " << report.rank_elements << " of " << report.model_elements << " elements are on a rank, "
      << report.part_elements << " of them parts\n";
  for (const std::string& warning : report.warnings) out << "  warning: " << shown_message(warning) << '\n';
}

std::vector<NamedShape> read_parameter_shapes(const std::string& path) {
  std::vector<NamedShape> shapes;
  for (const fs::path& file : files_at(path)) read_file(file, shapes);
  require<IoError>(!shapes.empty() && shapes.size() <= kMostParametersByName, path, ": expected 1 to ",
                   kMostParametersByName, " parameters, found ", shapes.size());
  std::set<std::string> names;
  double total = 0;
  for (const NamedShape& shape : shapes) {
    require<IoError>(shape.name.size() <= kLongestName, path, ": expected names of up to ", kLongestName,
                     " letters, found one of ", shape.name.size());
    double elements = 1;
    for (const int64_t size : shape.sizes) elements *= static_cast<double>(size);
    total += elements;
    require<IoError>(total <= static_cast<double>(kMostParameters), path, ": expected up to ", kMostParameters,
                     " elements in all, found more");
    require<IoError>(names.insert(shape.name).second, path, ": '", shown_text(shape.name), "' is there twice");
  }
  return shapes;
}

}  // namespace ds::tool
