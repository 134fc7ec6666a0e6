#include "checkpoint/rank_files.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::checkpoint {
namespace {

std::string file_kind(const std::string& path) {
  const std::string folder = path.substr(0, path.find('/'));
  return folder == "buffers" ? "weights" : folder;
}

bool is_complete(const PlannedPiece& piece) {
  return piece.length == (piece.part ? piece.part->numel() : piece.tensor.numel());
}

// The name inside the file: that of the model for weights and buffers, so that other programs find them.
std::string key_of(const PlannedPiece& piece) {
  const std::string& path = piece.path;
  const bool of_model = path.starts_with("weights/") || path.starts_with("buffers/");
  std::string name = of_model ? path.substr(path.find('/') + 1) : path;
  if (piece.part) name += cat("@part-", piece.part->index(), "-of-", piece.part->count());
  return is_complete(piece) ? name : cat(name, "@", piece.offset);
}

}  // namespace

bool is_rank_file_name(const std::string& file) {
  return file.ends_with(".safetensors") && file.find("-of-") != std::string::npos &&
         (file.starts_with("weights-") || file.starts_with("optimizer-") || file.starts_with("ema-") ||
          file.starts_with("ranks-"));
}

RankFiles::File::File(const std::string& folder, std::string file_name,
                      const std::vector<SafetensorsWriter::Header>& headers)
    : name(std::move(file_name)), writer((std::filesystem::path(folder) / name).string(), headers, {{"format", "pt"}}) {
  const std::string& header = writer.header();
  record.bytes = writer.bytes();
  record.header_bytes = header.size();
  record.header_checksum = checksum(header.data(), header.size());
}

RankFiles::RankFiles(const std::string& folder, int rank, int ranks, const std::vector<PlannedPiece>& pieces) {
  std::map<std::string, std::vector<size_t>> kinds;
  for (size_t i = 0; i < pieces.size(); ++i) {
    kinds[file_kind(pieces[i].path)].push_back(i);
    index_.tensors.emplace(pieces[i].path, pieces[i].tensor);
    require(!pieces[i].part || pieces[i].part->whole_sizes() == pieces[i].tensor.sizes, "checkpoint: \"",
            pieces[i].path, "\": a part of another tensor");
  }
  places_.resize(pieces.size());
  for (const auto& [kind, members] : kinds) {
    char name[256];
    std::snprintf(name, sizeof name, "%s-%05d-of-%05d.safetensors", kind.c_str(), rank, ranks);
    std::vector<SafetensorsWriter::Header> headers;
    for (const size_t i : members) {
      const PlannedPiece& piece = pieces[i];
      headers.push_back(
          {key_of(piece), piece.tensor.dtype, is_complete(piece) ? piece.sizes() : std::vector<int64_t>{piece.length}});
    }
    File& file = files_.emplace_back(folder, name, headers);
    for (const size_t i : members) {
      const PlannedPiece& piece = pieces[i];
      const std::string key = key_of(piece);
      places_[i] = {&file, file.record.pieces.size(), static_cast<size_t>(piece.bytes())};
      file.record.pieces.push_back({.path = piece.path,
                                    .key = key,
                                    .offset = piece.offset,
                                    .length = piece.length,
                                    .begin = file.writer.position(key),
                                    .checksums = {},
                                    .part = piece.part ? std::optional(stored_part_of(*piece.part)) : std::nullopt});
    }
  }
}

void RankFiles::write(size_t index, const at::Tensor& values) {
  const Place& place = places_.at(index);
  Piece& piece = place.file->record.pieces[place.piece];
  require(values.is_cpu() && values.is_contiguous() && values.nbytes() == place.bytes, "checkpoint: \"", piece.path,
          "\": expected ", place.bytes, " contiguous bytes on the CPU, found ", describe(values));
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  // Block by block: what was just read for its checksum is still in the cache when it is written.
  for (size_t at = 0; at < place.bytes; at += kChecksumBlock) {
    const size_t bytes = std::min(kChecksumBlock, place.bytes - at);
    piece.checksums.push_back(checksum(data + at, bytes));
    place.file->writer.write_bytes(piece.key, at, data + at, bytes);
  }
}

Index RankFiles::finish(bool durable) {
  for (File& file : files_) {
    file.writer.commit(durable);
    index_.files.emplace(file.name, std::move(file.record));
  }
  return std::move(index_);
}

}  // namespace ds::checkpoint
