#include "checkpoint/index.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/file_in_folder.h"
#include "checkpoint/stored_file.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/json/json_depth.h"
#include "core/json/json_integer.h"
#include "core/shown_text.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;

// More than any job has ranks and any parameter has blocks, and so few that a list of them is small.
constexpr int64_t kMostPartsOfACut = int64_t{1} << 20;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

int64_t number(const json& value, const char* key, int64_t least, int64_t most, const std::string& where) {
  const json& found = value.at(key);
  const bool fits = found.is_number_integer() &&
                    !(found.is_number_unsigned() && found.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  require<IoError>(fits && found.get<int64_t>() >= least && found.get<int64_t>() <= most, where, ": a part's \"", key,
                   "\": expected an integer of ", least, " to ", most, ", found ", found);
  return found.get<int64_t>();
}

// Requires as few blocks as cut_problem() can add up without an overflow.
void require_blocks(const Cut& cut, int64_t extent, const std::string& where) {
  const auto blocks = static_cast<int64_t>(std::max<size_t>(cut.blocks.size(), 1));
  require<IoError>(blocks <= kMostBlocks && cut.repeats <= kMostBlocks / blocks, where, ": a part of ", blocks,
                   " blocks that are repeated ", cut.repeats, " times; expected up to ", kMostBlocks, " in all");
  int64_t sum = 0;
  for (const int64_t block : cut.blocks) {
    require<IoError>(block >= 0 && block <= extent - sum, where, ": a part's blocks: ", block, " after ", sum,
                     " elements, of a dimension that has ", extent);
    sum += block;
  }
  require<IoError>(sum == 0 || cut.repeats <= extent / sum, where, ": a part's blocks of ", sum, " elements, repeated ",
                   cut.repeats, " times, of a dimension that has ", extent);
}

using Runs = std::vector<std::pair<int64_t, int64_t>>;  // first element, elements

// The pieces of one tensor that files have.
struct Found {
  const std::optional<StoredPart>* part = nullptr;  // of its first piece
  std::map<int, Runs> runs;                         // by index of the part; 0 for the whole
};

// Returns the elements of the tensor or part in which a piece's offset and length count.
int64_t elements_of(const Piece& piece, const TensorInfo& tensor, const std::string& where) {
  return piece.part ? tensor_part_of(*piece.part, tensor.sizes, where).numel() : tensor.numel();
}

std::string tensor_name(const std::string& path, const std::optional<StoredPart>& part, int index) {
  if (!part) return cat("\"", path, "\"");
  return cat("\"", path, "\", ", name_of(StoredPart{.cut = {}, .index = index, .count = part->count}));
}

void require_piece(const TensorInfo& tensor, const FileRecord& record, const Piece& piece, const std::string& where) {
  const std::string what = tensor_name(piece.path, piece.part, piece.part ? piece.part->index : 0);
  const int64_t numel = elements_of(piece, tensor, cat(where, ": \"", piece.path, "\""));
  require<IoError>(
      piece.offset >= 0 && piece.length >= 0 && piece.length <= numel && piece.offset <= numel - piece.length, where,
      ": elements ", piece.offset, " to ", piece.offset, " + ", piece.length, " of ", what, ", which has ", numel);
  const uint64_t bytes = static_cast<uint64_t>(piece.length) * c10::elementSize(tensor.dtype);
  require<IoError>(
      piece.begin >= record.header_bytes && piece.begin <= record.bytes && bytes <= record.bytes - piece.begin, where,
      ": the piece of ", what, " ends after the file");
  require<IoError>(piece.checksums.size() == (bytes + kChecksumBlock - 1) / kChecksumBlock, where, ": the piece of ",
                   what, " of ", bytes, " bytes has ", piece.checksums.size(), " checksums");
}

// Notes a piece. The pieces of a tensor are of one cut, or all of the whole.
void add_piece(Found& found, const Piece& piece, const std::string& where) {
  if (!found.part) found.part = &piece.part;
  const std::optional<StoredPart>& first = *found.part;
  const bool fits = first ? piece.part && piece.part->cut == first->cut && piece.part->count == first->count
                          : !piece.part.has_value();
  require<IoError>(fits, where, ": \"", piece.path, "\": expected pieces of the whole, or of parts of one cut, found ",
                   lazy([&] { return first ? to_json(*first) : nlohmann::json("whole"); }), " and ",
                   lazy([&] { return piece.part ? to_json(*piece.part) : nlohmann::json("whole"); }));
  if (piece.length > 0) found.runs[piece.part ? piece.part->index : 0].emplace_back(piece.offset, piece.length);
}

// Requires that the runs have elements 0 to `numel`, each once. `what` names the tensor.
void require_covered(Runs& runs, int64_t numel, const std::string& what) {
  std::sort(runs.begin(), runs.end());
  int64_t end = 0;
  for (const auto& [offset, length] : runs) {
    require<IoError>(offset == end, what, ": element ", std::min(offset, end),
                     offset < end ? " is there twice" : " is in no file");
    end = offset + length;
  }
  require<IoError>(end == numel, what, ": elements from ", end, " to ", numel, " are in no file");
}

// Requires all parts of a tensor. Parts with elements come first, so that no more parts are looked at than there are
// pieces.
void require_all_parts(Found& found, const std::string& path, const TensorInfo& tensor, const std::string& where) {
  StoredPart part = **found.part;
  int64_t rest = tensor.numel();
  for (part.index = 0; rest > 0 && part.index < part.count; ++part.index) {
    const int64_t numel = tensor_part_of(part, tensor.sizes, where).numel();
    require_covered(found.runs[part.index], numel, cat(where, ": ", tensor_name(path, part, part.index)));
    rest -= numel;
  }
  ensure(rest == 0, "all parts together are the whole");
}

// Requires that every piece lies in its tensor, or in the part of it that it names, and in its file, and that every
// element of every tensor is there exactly once. All pieces of a tensor are of the whole, or of parts of one cut.
// Throws IoError that begins with `where`.
void require_complete(const Index& index, const std::string& where) {
  std::map<std::string, Found> found;
  for (const auto& [file, record] : index.files) {
    const std::string here = cat(where, ": ", file);
    require<IoError>(record.header_bytes <= record.bytes, here, ": a header of ", record.header_bytes,
                     " bytes in a file of ", record.bytes);
    require<IoError>(record.header_bytes <= kMostIndexBytes, here, ": a header of ", record.header_bytes,
                     " bytes, expected at most ", kMostIndexBytes);
    for (const Piece& piece : record.pieces) {
      const auto tensor = index.tensors.find(piece.path);
      require<IoError>(tensor != index.tensors.end(), here, " holds a piece of \"", piece.path,
                       "\", which is no tensor of the checkpoint");
      require_piece(tensor->second, record, piece, here);
      add_piece(found[piece.path], piece, here);
    }
  }
  for (const auto& [path, tensor] : index.tensors) {
    Found& pieces = found[path];
    if (pieces.part && *pieces.part) {
      require_all_parts(pieces, path, tensor, where);
    } else {
      require_covered(pieces.runs[0], tensor.numel(), cat(where, ": \"", path, "\""));
    }
  }
}

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

// Whether an index or a table of a rank has parts of tensors; false for anything else.
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

StoredPart stored_part_of(const TensorPart& part) {
  const int64_t extent = part.whole_sizes()[part.cut().dim];
  return {.cut = normalized(part.cut(), extent, part.count()), .index = part.index(), .count = part.count()};
}

json to_json(const StoredPart& part) {
  json result = {{"dim", part.cut.dim}, {"index", part.index}, {"count", part.count}};
  if (!part.cut.blocks.empty()) result["blocks"] = part.cut.blocks;
  if (part.cut.repeats != 1) result["repeats"] = part.cut.repeats;
  if (part.cut.grain != 1) result["grain"] = part.cut.grain;
  if (part.cut.order == PartOrder::kZigzag) result["order"] = "zigzag";
  return result;
}

StoredPart stored_part_from(const json& value, const std::string& where) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  require<IoError>(value.is_object(), where, ": expected the part that a piece is of, found ", value);
  StoredPart part;
  part.count = static_cast<int>(number(value, "count", 1, kMostPartsOfACut, where));
  part.index = static_cast<int>(number(value, "index", 0, part.count - 1, where));
  part.cut.dim = number(value, "dim", 0, kMost, where);
  if (value.contains("repeats")) part.cut.repeats = number(value, "repeats", 1, kMostBlocks, where);
  if (value.contains("grain")) part.cut.grain = number(value, "grain", 1, kMost, where);
  if (value.contains("blocks")) part.cut.blocks = json_integers<int64_t>(value["blocks"]);
  if (value.contains("order")) {
    require<IoError>(value["order"] == "zigzag", where, ": a part's \"order\": expected \"zigzag\", found ",
                     value["order"]);
    part.cut.order = PartOrder::kZigzag;
  }
  return part;
}

TensorPart tensor_part_of(const StoredPart& part, const std::vector<int64_t>& sizes, const std::string& where) {
  require<IoError>(part.cut.dim < static_cast<int64_t>(sizes.size()), where, ": a part along dimension ", part.cut.dim,
                   " of a tensor of ", sizes.size(), " dimensions");
  require_blocks(part.cut, sizes[part.cut.dim], where);
  const std::string problem = cut_problem(part.cut, sizes[part.cut.dim]);
  require<IoError>(problem.empty(), where, ": a part along dimension ", part.cut.dim, ": ", problem);
  return {sizes, part.cut, part.index, part.count};
}

std::string name_of(const StoredPart& part) { return cat("part ", part.index, " of ", part.count); }

std::string sealed(const json& content) {
  const std::string text = content.dump();
  const int version = has_parts(content) ? kPartVersion : kWholeVersion;
  return cat("{\"format\":\"", kFormat, "\",\"version\":", version, ",\"checksum\":\"",
             to_hex(checksum(text.data(), text.size())), "\",\n\"content\":", text, "}\n");
}

json unsealed(const std::string& text, const std::string& where) {
  json value = parse_shallow_json<json>(text);
  require<IoError>(value.is_object() && value.value("format", json()) == kFormat && value.contains("content"), where,
                   ": expected JSON of a ", kFormat, ", found ", text.size(), " bytes of something else; the file is ",
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

namespace {

// Runs of elements of a tensor, or of a part of one, as begin -> end. They do not overlap.
using ElementRuns = std::map<int64_t, int64_t>;
using RunsByTensor = std::map<std::pair<std::string, int>, ElementRuns>;

std::pair<std::string, int> key_of(const Piece& piece) { return {piece.path, piece.part ? piece.part->index : -1}; }

RunsByTensor runs_of(const Index& index) {
  RunsByTensor runs;
  for (const auto& [name, file] : index.files) {
    for (const Piece& piece : file.pieces) runs[key_of(piece)][piece.offset] = piece.offset + piece.length;
  }
  return runs;
}

// Returns how many elements of [begin, end) the runs have.
int64_t covered(const ElementRuns& runs, int64_t begin, int64_t end) {
  int64_t count = 0;
  auto run = runs.upper_bound(begin);
  if (run != runs.begin()) --run;
  for (; run != runs.end() && run->first < end; ++run) {
    count += std::max<int64_t>(0, std::min(end, run->second) - std::max(begin, run->first));
  }
  return count;
}

}  // namespace

void leave_out_covered(Index& other, const Index& here) {
  const RunsByTensor runs = runs_of(here);
  const auto is_here = [&](const Piece& piece) {
    const auto found = runs.find(key_of(piece));
    if (found == runs.end()) return false;
    const int64_t count = covered(found->second, piece.offset, piece.offset + piece.length);
    require<IoError>(count == 0 || count == piece.length, "checkpoint: \"", piece.path, "\": this host has ", count,
                     " of the ", piece.length, " elements from ", piece.offset, " on that another host has");
    return piece.length == 0 || count == piece.length;
  };
  for (auto& [name, file] : other.files) std::erase_if(file.pieces, is_here);
}

}  // namespace ds::checkpoint
