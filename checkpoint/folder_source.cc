#include "checkpoint/folder_source.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/index.h"
#include "checkpoint/stored_file.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::checkpoint {
namespace {

class FolderSource final : public Source {
 public:
  explicit FolderSource(const std::string& folder) : folder_(folder) {
    const std::filesystem::path path(folder);
    index_ = index_from(read_text((path / kIndexName).string()), (path / kIndexName).string());
    for (const auto& [name, record] : index_.files) {
      File& file = files_.emplace(name, File{StoredFile((path / name).string()), &record}).first->second;
      require<IoError>(file.stored.bytes() == record.bytes, file.stored.path(), ": expected ", record.bytes,
                       " bytes, found ", file.stored.bytes(), file.stored.bytes() < record.bytes ? ": truncated" : "");
      for (const Piece& piece : record.pieces) {
        if (piece.length > 0) pieces_[piece.path].push_back({&file, &piece});
      }
    }
    for (auto& [name, list] : pieces_) {
      std::sort(list.begin(), list.end(),
                [](const Stored& a, const Stored& b) { return a.piece->offset < b.piece->offset; });
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
    const std::vector<Stored>& pieces = pieces_.at(path);
    auto next = std::upper_bound(pieces.begin(), pieces.end(), offset,
                                 [](int64_t at, const Stored& stored) { return at < stored.piece->offset; });
    for (--next; offset < end; ++next) {
      const int64_t skipped = offset - next->piece->offset;
      const int64_t length = std::min(end - offset, next->piece->length - skipped);
      read_piece(*next, tensor.dtype, skipped, flat.narrow(0, offset + flat.numel() - end, length));
      offset += length;
    }
  }

 private:
  // Where everything lies is in the index, so a file is not opened before something in it is wanted: of a checkpoint of
  // many ranks each rank needs few.
  struct File {
    StoredFile stored;
    const FileRecord* record = nullptr;
    bool header_read = false;
  };
  struct Stored {
    File* file = nullptr;
    const Piece* piece = nullptr;
  };

  static void require_header(File& file) {
    if (file.header_read) return;
    std::string header(file.record->header_bytes, '\0');
    file.stored.read(0, header.data(), header.size());
    require<IoError>(checksum(header.data(), header.size()) == file.record->header_checksum, file.stored.path(),
                     ": its first ", header.size(), " bytes are not those that were written: damaged");
    file.header_read = true;
  }

  // Elements of a piece from `first` on.
  void read_piece(const Stored& stored, at::ScalarType dtype, int64_t first, const at::Tensor& destination) {
    if (open_ && open_ != stored.file) open_->stored.close();
    open_ = stored.file;
    require_header(*stored.file);
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
        read_block(stored, block, block_begin, target.mutable_data_ptr(), block_end - block_begin);
      } else {
        if (block_.size() < kChecksumBlock) block_.resize(kChecksumBlock);
        read_block(stored, block, block_begin, block_.data(), block_end - block_begin);
        target.copy_(at::from_blob(block_.data() + (begin - block_begin), {count}, dtype));
      }
      done += count;
      begin = part_end;
    }
  }

  static void read_block(const Stored& stored, size_t block, size_t position, void* to, size_t bytes) {
    stored.file->stored.read(stored.piece->begin + position, to, bytes);
    require<IoError>(checksum(to, bytes) == stored.piece->checksums[block], stored.file->stored.path(), ": tensor \"",
                     stored.piece->path, "\": bytes ", stored.piece->begin + position, " to ",
                     stored.piece->begin + position + bytes, " are not those that were written: the file is damaged; ",
                     "load another checkpoint");
  }

  std::string folder_;
  Index index_;
  std::map<std::string, File> files_;
  std::map<std::string, std::vector<Stored>> pieces_;  // by path, ascending
  File* open_ = nullptr;                               // of the last read
  std::vector<char> block_;
};

}  // namespace

std::unique_ptr<Source> open_folder(const std::string& folder) { return std::make_unique<FolderSource>(folder); }

}  // namespace ds::checkpoint
