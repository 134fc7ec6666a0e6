// The index of a checkpoint: which logical tensors it holds, and in which files their pieces lie.
//
// A folder <save_dir>/<tag>/ holds index.json and safetensors files. index.json: {"format", "version", "checksum" of
// "content" as JSON text without spaces, "content": {"state", "aliases", "tensors", "files"}}. It is written last and
// names every file with its size, so a folder with a whole index is a whole checkpoint. "version" is 2 where a piece is
// one of a part of its tensor, and 1 otherwise, which builds from before can read.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/source/training_state.h"
#include "core/split/tensor_part.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

struct StoredPart {
  Cut cut;
  int index = 0;
  int count = 1;

  bool operator==(const StoredPart&) const = default;
};

// Returns the part as an index names it: cuts that give the same parts compare equal.
StoredPart stored_part_of(const TensorPart& part);

// {"dim", "index", "count"}, and where they are not the usual ones "blocks", "repeats", "grain", "order": "zigzag".
nlohmann::json to_json(const StoredPart& part);
// Throws IoError that begins with `where`, and passes on what the JSON library throws: numbers that are none of a part.
StoredPart stored_part_from(const nlohmann::json& value, const std::string& where);

// The part of a tensor of `sizes`. Throws IoError that begins with `where` when it fits no such tensor. Takes time for
// the listed blocks, whatever the numbers are.
TensorPart tensor_part_of(const StoredPart& part, const std::vector<int64_t>& sizes, const std::string& where);

// "part 1 of 4", for messages.
std::string name_of(const StoredPart& part);

// A run of elements of a logical tensor, or of one rank's part of it, as one tensor of a file: under the tensor's name
// and shape if it is whole, as a flat one "NAME@OFFSET" otherwise. A part is stored as "NAME@part-INDEX-of-COUNT" with
// the part's shape, or flat with "@OFFSET" behind.
struct Piece {
  std::string path;                 // the logical tensor's, as in dsengine/checkpoint.h
  std::string key;                  // the name under which the file has it
  int64_t offset = 0;               // first element, in the flattened logical tensor or in the row-major part
  int64_t length = 0;               // elements
  uint64_t begin = 0;               // where its data begins in the file, in bytes
  std::vector<uint64_t> checksums;  // one for each of its blocks (checkpoint/block_checksum.h)
  std::optional<StoredPart> part = std::nullopt;  // none: a piece of the whole tensor
};

// One file of a checkpoint.
struct FileRecord {
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;
  uint64_t header_checksum = 0;
  std::vector<Piece> pieces;
};

// Everything that index.json says.
struct Index {
  TrainingState state;
  std::map<std::string, std::string> aliases;
  std::map<std::string, TensorInfo> tensors;
  std::map<std::string, FileRecord> files;  // files by their names in the folder
  // The folder is one host's, and has the files of its ranks; those of others lie on their hosts, in folders like it.
  bool of_one_host = false;
};

inline constexpr const char* kIndexName = "index.json";

// Returns the part of the index that one rank contributes: tensors and files.
nlohmann::json table_to_json(const Index& index);
// Adds the part that one rank contributes. Throws IoError that begins with `where`: what is missing or wrong, a tensor
// that two ranks describe differently, a file given twice.
void add_table(Index& index, const nlohmann::json& table, const std::string& where);

// Returns the text of index.json.
std::string to_text(const Index& index);
// Reads the text of index.json. Throws IoError that begins with `where`: no JSON, another format or version, a checksum
// that differs, pieces that do not cover their tensor exactly once.
Index index_from(const std::string& text, const std::string& where);

// Wraps a JSON value as {"checksum", "content"}, and unwraps it; for index.json and the tables of ranks.
std::string sealed(const nlohmann::json& content);
nlohmann::json unsealed(const std::string& text, const std::string& where);

// Leaves out of `other`, the index of another host's files, the pieces whose elements `here` has, so that each element
// has one place. Hosts that hold the same piece have each written all of it: throws IoError for a piece of which `here`
// has some elements only.
void leave_out_covered(Index& other, const Index& here);

}  // namespace ds::checkpoint
