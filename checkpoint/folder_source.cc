#include "checkpoint/folder_source.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/file_in_folder.h"
#include "checkpoint/index.h"
#include "checkpoint/source/part_reader.h"
#include "checkpoint/stored_file.h"
#include "comm/meeting/host_identity.h"
#include "core/check.h"
#include "core/split/part_runs.h"
#include "core/tensor_check.h"

namespace ds::checkpoint {
namespace {

class FolderSource final : public Source, public PartReader {
 public:
  explicit FolderSource(const std::string& folder) : folder_(folder) {
    const std::filesystem::path place(folder);
    const std::string index = (place / kIndexName).string();
    index_ = index_from(read_text(index), index);
    for (const auto& [name, record] : index_.files) {
      File& file = files_.emplace(name, file_of(file_in_folder(folder, name, index), record)).first->second;
      for (const Piece& piece : record.pieces) {
        if (piece.length > 0) group_of(piece).pieces.push_back({&file, &piece});
      }
    }
    for (auto& [path, groups] : stored_) {
      for (auto& [number, group] : groups) {
        std::sort(group.pieces.begin(), group.pieces.end(),
                  [](const Stored& a, const Stored& b) { return a.piece->offset < b.piece->offset; });
      }
    }
  }

  const std::string& location() const override { return folder_; }
  const TrainingState& state() const override { return index_.state; }
  const std::map<std::string, TensorInfo>& tensors() const override { return index_.tensors; }
  const std::map<std::string, std::string>& aliases() const override { return index_.aliases; }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    const TensorInfo& tensor = info(path);
    const int64_t end = offset + destination.numel();
    require(destination.is_cpu() && destination.is_contiguous() && offset >= 0 && end <= tensor.numel(), folder_,
            ": \"", path, "\": elements ", offset, " to ", end, " of ", tensor.numel(), " into ",
            describe(destination));
    if (offset == end) return;
    const at::Tensor flat = destination.view({-1});
    for (const auto& [number, group] : stored_.at(path)) {
      if (!group.part) {
        read_run(group, tensor.dtype, offset, flat);
        continue;
      }
      const PartRuns runs(tensor_part_of(*group.part, tensor.sizes, folder_));
      runs.in_whole(offset, end, [&](int64_t whole, int64_t part, int64_t length) {
        read_run(group, tensor.dtype, part, flat.narrow(0, whole - offset, length));
      });
    }
  }

  // Part by part, so that each block is read once.
  void read_own_part(const std::string& path, const TensorPart& part, int64_t offset, const at::Tensor& flat) override {
    const TensorInfo& tensor = info(path);
    const std::map<int, Group>& groups = stored_.at(path);
    const StoredPart wanted = stored_part_of(part);
    const auto same = groups.find(wanted.index);
    if (same != groups.end() && same->second.part == wanted) return read_run(same->second, tensor.dtype, offset, flat);
    const PartRuns wanted_runs(part);
    for (const auto& one : groups) {
      const Group& group = one.second;
      std::optional<PartRuns> stored;
      if (group.part) stored.emplace(tensor_part_of(*group.part, tensor.sizes, folder_));
      wanted_runs.in_part(offset, offset + flat.numel(), [&](int64_t whole, int64_t at, int64_t length) {
        if (!stored) return read_run(group, tensor.dtype, whole, flat.narrow(0, at - offset, length));
        stored->in_whole(whole, whole + length, [&](int64_t found, int64_t from, int64_t count) {
          read_run(group, tensor.dtype, from, flat.narrow(0, at - offset + found - whole, count));
        });
      });
    }
  }

 private:
  // Where everything lies is in the index, so a file is not opened before something in it is wanted: of a checkpoint of
  // many ranks each rank needs few.
  struct File {
    std::string path;
    std::optional<StoredFile> stored;  // none: on another host
    const FileRecord* record = nullptr;
    bool header_read = false;
  };
  struct Stored {
    File* file = nullptr;
    const Piece* piece = nullptr;
  };

  // The stored pieces of one part of a tensor, or of all of it.
  struct Group {
    std::optional<StoredPart> part;
    std::vector<Stored> pieces;  // ascending
  };

  File file_of(std::string path, const FileRecord& record) const {
    File file{std::move(path), std::nullopt, &record};
    std::error_code error;
    if (index_.of_one_host && !std::filesystem::exists(file.path, error)) return file;
    const StoredFile& stored = file.stored.emplace(file.path);
    require<IoError>(stored.bytes() == record.bytes, file.path, ": expected ", record.bytes, " bytes, found ",
                     stored.bytes(), stored.bytes() < record.bytes ? ": truncated" : "");
    return file;
  }

  Group& group_of(const Piece& piece) {
    Group& group = stored_[piece.path][piece.part ? piece.part->index : 0];
    group.part = piece.part;
    return group;
  }

  static void require_header(File& file) {
    if (file.header_read) return;
    std::string header(file.record->header_bytes, '\0');
    file.stored->read(0, header.data(), header.size());
    require<IoError>(checksum(header.data(), header.size()) == file.record->header_checksum, file.path, ": its first ",
                     header.size(), " bytes are not those that were written: damaged");
    file.header_read = true;
  }

  // Elements of a group from `offset` on.
  void read_run(const Group& group, at::ScalarType dtype, int64_t offset, const at::Tensor& flat) {
    const int64_t end = offset + flat.numel();
    auto next = std::upper_bound(group.pieces.begin(), group.pieces.end(), offset,
                                 [](int64_t at, const Stored& stored) { return at < stored.piece->offset; });
    for (--next; offset < end; ++next) {
      const int64_t skipped = offset - next->piece->offset;
      const int64_t length = std::min(end - offset, next->piece->length - skipped);
      read_piece(*next, dtype, skipped, flat.narrow(0, offset + flat.numel() - end, length));
      offset += length;
    }
  }

  // Elements of a piece from `first` on.
  void read_piece(const Stored& stored, at::ScalarType dtype, int64_t first, const at::Tensor& destination) {
    const size_t element = c10::elementSize(dtype);
    const size_t total = static_cast<size_t>(stored.piece->length) * element;
    size_t begin = static_cast<size_t>(first) * element;
    const size_t end = begin + static_cast<size_t>(destination.numel()) * element;
    const bool in_place = destination.scalar_type() == dtype;
    int64_t done = 0;
    while (begin < end) {
      const size_t block = begin / kChecksumBlock;
      const size_t block_begin = block * kChecksumBlock;
      const size_t block_end = std::min(block_begin + kChecksumBlock, total);
      const size_t part_end = std::min(end, block_end);
      const auto count = static_cast<int64_t>((part_end - begin) / element);
      const at::Tensor target = destination.narrow(0, done, count);
      if (in_place && begin == block_begin && part_end == block_end) {
        read_block(stored, block, target.mutable_data_ptr(), block_end - block_begin);
      } else {
        keep_block(stored, block, block_end - block_begin);
        char* const from = kept_.bytes.data() + (begin - block_begin);
        if (in_place) {
          std::memcpy(target.mutable_data_ptr(), from, part_end - begin);
        } else {
          target.copy_(at::from_blob(from, {count}, dtype));
        }
      }
      done += count;
      begin = part_end;
    }
  }

  // Parts of other ranks have many short runs in one block.
  void keep_block(const Stored& stored, size_t block, size_t bytes) {
    if (kept_.piece == stored.piece && kept_.block == block) return;
    if (kept_.bytes.size() < kChecksumBlock) kept_.bytes.resize(kChecksumBlock);
    kept_.piece = nullptr;
    read_block(stored, block, kept_.bytes.data(), bytes);
    kept_.piece = stored.piece;
    kept_.block = block;
  }

  void read_block(const Stored& stored, size_t block, void* to, size_t bytes) {
    require<IoError>(stored.file->stored.has_value(), stored.file->path, ": tensor \"", stored.piece->path,
                     "\": expected this file on host ", comm::host_name(), ", found none. The checkpoint was written ",
                     "with checkpoint.use_node_local_storage, each host has the files of its own ranks: load it with ",
                     "the same ranks on the same hosts at the same ZeRO stage, or copy the files of all hosts to one ",
                     "folder first");
    if (open_ && open_ != stored.file) open_->stored->close();
    open_ = stored.file;
    require_header(*stored.file);
    const uint64_t position = stored.piece->begin + block * kChecksumBlock;
    stored.file->stored->read(position, to, bytes);
    require<IoError>(checksum(to, bytes) == stored.piece->checksums[block], stored.file->path, ": tensor \"",
                     stored.piece->path, "\": bytes ", position, " to ", position + bytes,
                     " are not those that were written: the file is damaged; load another checkpoint");
  }

  std::string folder_;
  Index index_;
  std::map<std::string, File> files_;
  std::map<std::string, std::map<int, Group>> stored_;  // by path and part; tensors without elements have none
  File* open_ = nullptr;                                // of the last read
  // The block that was read last by way of memory.
  struct {
    const Piece* piece = nullptr;
    size_t block = 0;
    std::vector<char> bytes;
  } kept_;
};

}  // namespace

std::unique_ptr<Source> open_folder(const std::string& folder) { return std::make_unique<FolderSource>(folder); }

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
    // The file may lie on another host; the index shows whether this host's ranks have written all of theirs.
    std::error_code error;
    if (index.of_one_host && !std::filesystem::exists(std::filesystem::path(folder) / name, error)) continue;
    verify_file(folder, name, index, record, damages);
  }
  return damages;
}

}  // namespace ds::checkpoint
