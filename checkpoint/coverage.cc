#include "checkpoint/coverage.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/stored_file.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

using Runs = std::vector<std::pair<int64_t, int64_t>>;  // first element, elements

// What there is of a tensor.
struct Found {
  const std::optional<StoredPart>* part = nullptr;  // of its first piece
  std::map<int, Runs> runs;                         // by index of the part; 0 for the whole
};

// Elements of what a piece's offset and length run in.
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

// Pieces are of one cut, or all of the whole.
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

// Elements 0 to `numel`, each once. `what`: of what, with the tensor's name.
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

// Parts with elements are the first ones, so that no more are looked at than there are pieces.
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

}  // namespace

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

}  // namespace ds::checkpoint
