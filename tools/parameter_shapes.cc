#include "tools/parameter_shapes.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/json/json_depth.h"
#include "core/shown_text.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

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
  JsonDepth depth;
  ordered_json json = ordered_json::parse(text, std::ref(depth), /*allow_exceptions=*/false);
  require<IoError>(!depth.exceeded() && json.is_object(), path,
                   ": expected a safetensors file, or a JSON object {\"name\": [sizes], ...}");
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
  std::ifstream in(path, std::ios::binary);
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
