#include "checkpoint/verify.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/block_checksum.h"
#include "checkpoint/file_in_folder.h"
#include "checkpoint/index.h"
#include "checkpoint/stored_file.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

void verify_file(const std::string& folder, const std::string& name, const Index& index, const FileRecord& record,
                 std::vector<Damage>& damages) {
  try {
    StoredFile file(file_in_folder(folder, name, kIndexName));
    if (file.bytes() != record.bytes) {
      damages.push_back({name, "", cat("expected ", record.bytes, " bytes, found ", file.bytes())});
      if (file.bytes() < record.header_bytes) return;
    }
    std::vector<char> block(std::min<uint64_t>(std::max<uint64_t>(kChecksumBlock, record.header_bytes), record.bytes));
    file.read(0, block.data(), record.header_bytes);
    if (checksum(block.data(), record.header_bytes) != record.header_checksum) {
      damages.push_back({name, "", cat("its header, the first ", record.header_bytes, " bytes, was changed")});
    }
    for (const Piece& piece : record.pieces) {
      const uint64_t bytes = static_cast<uint64_t>(piece.length) * c10::elementSize(index.tensors.at(piece.path).dtype);
      for (uint64_t at = 0; at < bytes; at += kChecksumBlock) {
        const size_t part = std::min<uint64_t>(kChecksumBlock, bytes - at);
        if (piece.begin + at + part > file.bytes()) {
          damages.push_back({name, piece.path,
                             cat("truncated: the file ends at byte ", file.bytes(), ", expected ", bytes,
                                 " bytes of this tensor from byte ", piece.begin, " on")});
          break;
        }
        file.read(piece.begin + at, block.data(), part);
        if (checksum(block.data(), part) == piece.checksums[at / kChecksumBlock]) continue;
        damages.push_back(
            {name, piece.path,
             cat("bytes ", piece.begin + at, " to ", piece.begin + at + part, " are not those that were written")});
      }
    }
  } catch (const IoError& error) {
    damages.push_back({name, "", error.what()});
  }
}

}  // namespace

std::vector<Damage> verify(const std::string& folder) {
  require<IoError>(std::filesystem::is_directory(folder), folder, ": expected the folder of a checkpoint, found none");
  const std::string path = (std::filesystem::path(folder) / kIndexName).string();
  Index index;
  try {
    index = index_from(read_text(path), path);
  } catch (const IoError& error) {
    return {{kIndexName, "", error.what()}};
  }
  std::vector<Damage> damages;
  for (const auto& [name, record] : index.files) {
    // Of another host; what this one's ranks have written is seen by the index to be whole.
    std::error_code error;
    if (index.of_one_host && !std::filesystem::exists(std::filesystem::path(folder) / name, error)) continue;
    verify_file(folder, name, index, record, damages);
  }
  return damages;
}

}  // namespace ds::checkpoint
