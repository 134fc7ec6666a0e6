#include "checkpoint/index.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "core/check.h"
#include "core/json_depth.h"
#include "core/safetensors.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "dsengine checkpoint";
constexpr int kVersion = 1;
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
  tensor.sizes = value.at("shape").get<std::vector<int64_t>>();
  int64_t numel = 1;
  for (const int64_t size : tensor.sizes) {
    require<IoError>(size >= 0 && !__builtin_mul_overflow(numel, size, &numel) && numel < kMostElements, where,
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
    pieces.push_back({piece.path, piece.key, piece.offset, piece.length, piece.begin, checksums});
  }
  return {{"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_checksum", to_hex(file.header_checksum)},
          {"pieces", pieces}};
}

Piece piece_from(const json& value, const std::string& where) {
  Piece piece{.path = value.at(0).get<std::string>(),
              .key = value.at(1).get<std::string>(),
              .offset = value.at(2).get<int64_t>(),
              .length = value.at(3).get<int64_t>(),
              .begin = value.at(4).get<uint64_t>(),
              .checksums = {}};
  const std::string checksums = value.at(5).get<std::string>();
  constexpr size_t kDigits = 16;
  for (size_t at = 0; at < checksums.size(); at += kDigits) {
    piece.checksums.push_back(from_hex(checksums.substr(at, kDigits), where));
  }
  return piece;
}

FileRecord file_from(const json& value, const std::string& where) {
  FileRecord file;
  file.bytes = value.at("bytes").get<uint64_t>();
  file.header_bytes = value.at("header_bytes").get<uint64_t>();
  file.header_checksum = from_hex(value.at("header_checksum").get<std::string>(), where);
  for (const json& piece : value.at("pieces")) file.pieces.push_back(piece_from(piece, where));
  return file;
}

void require_piece(const Index& index, const std::string& file, const FileRecord& record, const Piece& piece,
                   const std::string& where) {
  const auto found = index.tensors.find(piece.path);
  require<IoError>(found != index.tensors.end(), where, ": ", file, " holds a piece of \"", piece.path,
                   "\", which is no tensor of the checkpoint");
  const int64_t numel = found->second.numel();
  require<IoError>(
      piece.offset >= 0 && piece.length >= 0 && piece.length <= numel && piece.offset <= numel - piece.length, where,
      ": ", file, ": elements ", piece.offset, " to ", piece.offset, " + ", piece.length, " of \"", piece.path,
      "\", which has ", numel);
  const uint64_t bytes = static_cast<uint64_t>(piece.length) * c10::elementSize(found->second.dtype);
  require<IoError>(
      piece.begin >= record.header_bytes && piece.begin <= record.bytes && bytes <= record.bytes - piece.begin, where,
      ": ", file, ": the piece of \"", piece.path, "\" ends after the file");
  require<IoError>(piece.checksums.size() == (bytes + kChecksumBlock - 1) / kChecksumBlock, where, ": ", file,
                   ": the piece of \"", piece.path, "\" of ", bytes, " bytes has ", piece.checksums.size(),
                   " checksums");
}

// Every element of every tensor exactly once.
void require_complete(const Index& index, const std::string& where) {
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> runs;
  for (const auto& [file, record] : index.files) {
    require<IoError>(record.header_bytes <= record.bytes, where, ": ", file, ": a header of ", record.header_bytes,
                     " bytes in a file of ", record.bytes);
    for (const Piece& piece : record.pieces) {
      require_piece(index, file, record, piece, where);
      if (piece.length > 0) runs[piece.path].emplace_back(piece.offset, piece.length);
    }
  }
  for (const auto& [path, tensor] : index.tensors) {
    std::vector<std::pair<int64_t, int64_t>>& pieces = runs[path];
    std::sort(pieces.begin(), pieces.end());
    int64_t end = 0;
    for (const auto& [offset, length] : pieces) {
      require<IoError>(offset == end, where, ": \"", path, "\": element ", std::min(offset, end),
                       offset < end ? " is there twice" : " is in no file");
      end = offset + length;
    }
    require<IoError>(end == tensor.numel(), where, ": \"", path, "\": elements from ", end, " to ", tensor.numel(),
                     " are in no file");
  }
}

}  // namespace

std::string sealed(const json& content) {
  const std::string text = content.dump();
  return cat("{\"format\":\"", kFormat, "\",\"version\":", kVersion, ",\"checksum\":\"",
             to_hex(checksum(text.data(), text.size())), "\",\n\"content\":", text, "}\n");
}

json unsealed(const std::string& text, const std::string& where) {
  JsonDepth depth;
  json value = json::parse(text, std::ref(depth), /*allow_exceptions=*/false);
  require<IoError>(
      !depth.exceeded() && value.is_object() && value.value("format", json()) == kFormat && value.contains("content"),
      where, ": expected JSON of a ", kFormat, ", found ", text.size(), " bytes of something else; the file is ",
      "damaged, was not written to its end, or is no checkpoint of dsengine");
  require<IoError>(value.value("version", json()) == kVersion, where, ": expected version ", kVersion, ", found ",
                   value.value("version", json()), "; read it with the dsengine that wrote it");
  const json& content = value["content"];
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
      require<IoError>(!name.empty() && name.find('/') == std::string::npos, where, ": file \"", name,
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
  return sealed(content);
}

Index index_from(const std::string& text, const std::string& where) {
  const json content = unsealed(text, where);
  Index index;
  try {
    index.state = training_state_from(content.at("state"), where);
    index.aliases = content.at("aliases").get<std::map<std::string, std::string>>();
  } catch (const json::exception& error) {
    throw IoError(cat(where, ": ", error.what()));
  }
  add_table(index, content, where);
  require_complete(index, where);
  return index;
}

}  // namespace ds::checkpoint
