#include "checkpoint/index.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "checkpoint/coverage.h"
#include "checkpoint/file_in_folder.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/json/json_depth.h"
#include "core/json/json_integer.h"
#include "core/shown_text.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "dsengine checkpoint";
constexpr int kWholeVersion = 1;  // without parts
constexpr int kPartVersion = 2;
constexpr size_t kPartAt = 6;  // in the list of a piece
constexpr int64_t kMostElements = int64_t{1} << 58;

json tensor_to_json(const TensorInfo& tensor) {
  json result = {{"dtype", safetensors_name(tensor.dtype)}, {"shape", tensor.sizes}};
  if (tensor.frozen) result["frozen"] = true;
  return result;
}

TensorInfo tensor_from(const json& value, const std::string& where) {
  TensorInfo tensor;
  const std::string name = value.at("dtype").get<std::string>();
  const auto dtype = safetensors_dtype(name);
  require<IoError>(dtype.has_value(), where, ": dtype \"", name, "\" is unknown");
  tensor.dtype = *dtype;
  tensor.sizes = json_integers<int64_t>(value.at("shape"));
  int64_t numel = 1;
  for (const int64_t size : tensor.sizes) {
    // Strides are computed without sizes of 0.
    require<IoError>(
        size >= 0 && !__builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel) && numel < kMostElements, where,
        ": shape ", value.at("shape"), " is none of a tensor");
  }
  tensor.frozen = value.value("frozen", false);
  return tensor;
}

json file_to_json(const FileRecord& file) {
  json pieces = json::array();
  for (const Piece& piece : file.pieces) {
    std::string checksums;
    for (const uint64_t value : piece.checksums) checksums += to_hex(value);
    json& written =
        pieces.emplace_back(json::array({piece.path, piece.key, piece.offset, piece.length, piece.begin, checksums}));
    if (piece.part) written.push_back(to_json(*piece.part));
  }
  return {{"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_checksum", to_hex(file.header_checksum)},
          {"pieces", pieces}};
}

Piece piece_from(const json& value, const std::string& where) {
  Piece piece{.path = value.at(0).get<std::string>(),
              .key = value.at(1).get<std::string>(),
              .offset = json_integer<int64_t>(value.at(2)),
              .length = json_integer<int64_t>(value.at(3)),
              .begin = json_integer<uint64_t>(value.at(4)),
              .checksums = {},
              .part = std::nullopt};
  const std::string checksums = value.at(5).get<std::string>();
  constexpr size_t kDigits = 16;
  for (size_t at = 0; at < checksums.size(); at += kDigits) {
    piece.checksums.push_back(from_hex(checksums.substr(at, kDigits), where));
  }
  if (value.size() > kPartAt) piece.part = stored_part_from(value[kPartAt], cat(where, ": \"", piece.path, "\""));
  return piece;
}

FileRecord file_from(const json& value, const std::string& where) {
  FileRecord file;
  file.bytes = json_integer<uint64_t>(value.at("bytes"));
  file.header_bytes = json_integer<uint64_t>(value.at("header_bytes"));
  file.header_checksum = from_hex(value.at("header_checksum").get<std::string>(), where);
  for (const json& piece : value.at("pieces")) file.pieces.push_back(piece_from(piece, where));
  return file;
}

// In what an index or a table of a rank has; false for anything else.
bool has_parts(const json& content) {
  const auto files = content.find("files");
  if (files == content.end() || !files->is_object()) return false;
  return std::any_of(files->begin(), files->end(), [](const json& file) {
    if (!file.is_object() || !file.contains("pieces")) return false;
    const json& pieces = file["pieces"];
    return std::any_of(pieces.begin(), pieces.end(), [](const json& piece) { return piece.size() > kPartAt; });
  });
}

}  // namespace

std::string sealed(const json& content) {
  const std::string text = content.dump();
  const int version = has_parts(content) ? kPartVersion : kWholeVersion;
  return cat("{\"format\":\"", kFormat, "\",\"version\":", version, ",\"checksum\":\"",
             to_hex(checksum(text.data(), text.size())), "\",\n\"content\":", text, "}\n");
}

json unsealed(const std::string& text, const std::string& where) {
  JsonDepth depth;
  json value = json::parse(text, std::ref(depth), /*allow_exceptions=*/false);
  require<IoError>(
      !depth.exceeded() && value.is_object() && value.value("format", json()) == kFormat && value.contains("content"),
      where, ": expected JSON of a ", kFormat, ", found ", text.size(), " bytes of something else; the file is ",
      "damaged, was not written to its end, or is no checkpoint of dsengine");
  const json version = value.value("version", json());
  require<IoError>(version == kWholeVersion || version == kPartVersion, where, ": expected version ", kWholeVersion,
                   " or ", kPartVersion, ", found ", version, "; read it with the dsengine that wrote it");
  const json& content = value["content"];
  require<IoError>(version == kPartVersion || !has_parts(content), where, ": version ", version,
                   " has no parts of tensors, but a piece names one: the file was damaged or changed by hand");
  const std::string canonical = content.dump(-1, ' ', false, json::error_handler_t::replace);
  require<IoError>(value.value("checksum", json()) == to_hex(checksum(canonical.data(), canonical.size())), where,
                   ": the checksum does not fit the content: the file was damaged or changed by hand");
  return std::move(value["content"]);
}

json table_to_json(const Index& index) {
  json tensors = json::object();
  for (const auto& [path, tensor] : index.tensors) tensors[path] = tensor_to_json(tensor);
  json files = json::object();
  for (const auto& [name, file] : index.files) files[name] = file_to_json(file);
  return {{"tensors", tensors}, {"files", files}};
}

void add_table(Index& index, const json& table, const std::string& where) {
  try {
    for (const auto& [path, value] : table.at("tensors").items()) {
      const TensorInfo tensor = tensor_from(value, cat(where, ": \"", path, "\""));
      const auto [place, is_new] = index.tensors.emplace(path, tensor);
      const TensorInfo& known = place->second;
      require<IoError>(is_new || known == tensor, where, ": \"", path,
                       "\" is described in two ways: ", lazy([&] { return tensor_to_json(known); }), " and ", value);
    }
    for (const auto& [name, value] : table.at("files").items()) {
      require<IoError>(is_plain_file_name(name), where, ": file \"", shown_text(name),
                       "\": expected a name without folders");
      const bool is_new = index.files.emplace(name, file_from(value, cat(where, ": ", name))).second;
      require<IoError>(is_new, where, ": file ", name, " is there twice");
    }
  } catch (const json::exception& error) {
    throw IoError(cat(where, ": ", error.what()));
  }
}

std::string to_text(const Index& index) {
  json content = table_to_json(index);
  content["state"] = to_json(index.state);
  content["aliases"] = index.aliases;
  if (index.of_one_host) content["of_one_host"] = true;
  return sealed(content);
}

Index index_from(const std::string& text, const std::string& where) {
  const json content = unsealed(text, where);
  Index index;
  try {
    index.state = training_state_from(content.at("state"), where);
    index.aliases = content.at("aliases").get<std::map<std::string, std::string>>();
    index.of_one_host = content.value("of_one_host", false);
  } catch (const json::exception& error) {
    throw IoError(cat(where, ": ", error.what()));
  }
  add_table(index, content, where);
  require_complete(index, where);
  return index;
}

}  // namespace ds::checkpoint
