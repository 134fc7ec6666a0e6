#include "checkpoint/export.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isinf.h>
#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/module_file.h"
#include "checkpoint/save_job.h"
#include "checkpoint/source/tensor_parts.h"
#include "checkpoint/tag_folder.h"
#include "checkpoint/weight_files.h"
#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/files/safetensors.h"
#include "core/system_call.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

struct ExportItem {
  std::string path;  // in the source
  std::string name;  // in the file
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  int64_t bytes = 0;
};

struct Shard {
  std::vector<const ExportItem*> items;
  int64_t bytes = 0;
};

std::string renamed(const ExportOptions& options, const std::string& name) {
  return options.rename ? options.rename(name) : name;
}

// The name that a module gives what lies under `path`; empty for what is not written: neither weight nor buffer.
std::string exported_name(const std::string& path, const TensorInfo& info, const ExportOptions& options) {
  const std::string weight = name_in("weights/", path);
  if (!weight.empty()) {
    const bool left_out = info.frozen ? options.exclude_frozen : options.ema;
    return left_out ? std::string() : weight;
  }
  if (options.ema && path.starts_with("ema/")) return name_in("ema/", path);
  return options.buffers ? name_in("buffers/", path) : std::string();
}

// Throws UsageError where a trained weight has no moving average.
void require_averages(const Source& source) {
  for (const auto& [path, info] : source.tensors()) {
    const std::string name = name_in("weights/", path);
    if (name.empty() || info.frozen) continue;
    require(source.contains(ema_path(name)), source.location(), ": \"", ema_path(name), "\": expected the moving ",
            "average of a weight, found none: the run that saved it kept none (.ema of initialize()); export the ",
            "weights themselves");
  }
}

at::ScalarType dtype_of(at::ScalarType stored, const ExportOptions& options) {
  if (options.dtype) return at::isFloatingType(stored) ? *options.dtype : stored;
  return options.widen && at::isReducedFloatingType(stored) ? at::kFloat : stored;
}

std::vector<ExportItem> items_of(const Source& source, const ExportOptions& options) {
  if (options.ema) require_averages(source);
  std::map<std::string, std::vector<std::string>> aliases;  // stored name -> further names
  for (const auto& [name, stored] : source.aliases()) aliases[stored].push_back(name);
  std::map<std::string, ExportItem> by_name;
  for (const auto& [path, info] : source.tensors()) {
    const std::string stored = exported_name(path, info, options);
    if (stored.empty()) continue;
    const at::ScalarType dtype = dtype_of(info.dtype, options);
    std::vector<std::string> names = {stored};
    if (options.keep_aliases) names.insert(names.end(), aliases[stored].begin(), aliases[stored].end());
    for (const std::string& original : names) {
      const std::string name = renamed(options, original);
      if (name.empty()) continue;
      const auto bytes = info.numel() * static_cast<int64_t>(c10::elementSize(dtype));
      const auto [place, is_new] = by_name.emplace(name, ExportItem{path, name, dtype, info.sizes, bytes});
      require(is_new, source.location(), ": \"", path, "\" and \"", place->second.path,
              "\" would both be exported as \"", name, "\"; change the renaming");
    }
  }
  require(!by_name.empty(), source.location(),
          ": no tensor is left to export; change the renaming or what is left out");
  std::vector<ExportItem> items;
  for (auto& [name, item] : by_name) items.push_back(std::move(item));
  return items;
}

std::vector<Shard> shards_of(const std::vector<ExportItem>& items, int64_t max_bytes) {
  std::vector<Shard> shards(1);
  for (const ExportItem& item : items) {
    if (!shards.back().items.empty() && shards.back().bytes + item.bytes > max_bytes) shards.emplace_back();
    shards.back().items.push_back(&item);
    shards.back().bytes += item.bytes;
  }
  return shards;
}

// {"format": "pt"} and, when tied weights are written once, their further names.
std::map<std::string, std::string> metadata_of(const Source& source, const Shard& shard, const ExportOptions& options) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (options.keep_aliases) return metadata;
  std::map<std::string, std::string> written;  // path -> name in the file
  for (const ExportItem* item : shard.items) written[item->path] = item->name;
  for (const auto& [name, stored] : source.aliases()) {
    const bool averaged = options.ema && source.contains(ema_path(stored));
    const auto found = written.find(averaged ? ema_path(stored) : weight_path(stored));
    const std::string further = renamed(options, name);
    if (found != written.end() && !further.empty()) metadata.emplace(further, found->second);
  }
  return metadata;
}

// `part`: values of the item as the source stores them.
at::Tensor converted(const Source& source, const ExportItem& item, const at::Tensor& part) {
  const at::Tensor result = part.to(item.dtype);
  if (item.dtype != at::kHalf || part.scalar_type() == at::kHalf) return result;
  const auto lost = at::isinf(result).sum().item<int64_t>() - at::isinf(part).sum().item<int64_t>();
  require<IoError>(lost == 0, source.location(), ": tensor \"", item.path, "\" has values beyond float16's 65504; ",
                   "export it as bfloat16 or float32");
  return result;
}

void write_item(Source& source, const ExportItem& item, SafetensorsWriter& writer) {
  if (source.info(item.path).numel() == 0) writer.write(item.name, at::empty(item.sizes, item.dtype));
  size_t position = 0;
  for_each_part(source, item.path, [&](const at::Tensor& part) {
    const at::Tensor values = converted(source, item, part);
    writer.write_bytes(item.name, position, values.const_data_ptr(), values.nbytes());
    position += values.nbytes();
  });
}

SafetensorsWriter& begin_shard(std::deque<SafetensorsWriter>& writers, const std::string& path, const Shard& shard,
                               const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Header> headers;
  for (const ExportItem* item : shard.items) headers.push_back({item->name, item->dtype, item->sizes});
  return writers.emplace_back(path, headers, metadata);
}

std::string index_text(const std::vector<Shard>& shards, int64_t total_bytes) {
  nlohmann::json map = nlohmann::json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string file = shard_name(static_cast<int64_t>(i) + 1, static_cast<int64_t>(shards.size()));
    for (const ExportItem* item : shards[i].items) map[item->name] = file;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", map}};
  return index.dump(2) + "\n";
}

void remove_file(const fs::path& path) {
  std::error_code failure;
  fs::remove(path, failure);
  require<IoError>(!failure, path.native(), ": a file of an older export cannot be removed: ", SystemReason(failure));
}

// Removes the files that an older export left and this one did not replace.
void remove_leftovers(const fs::path& folder, const std::vector<std::string>& written) {
  std::vector<fs::path> old;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool of_export = name == kWeightFile || name == kWeightIndex || is_shard_name(name);
    if (of_export && std::find(written.begin(), written.end(), name) == written.end()) old.push_back(entry.path());
  }
  for (const fs::path& path : old) remove_file(path);
}

}  // namespace

ExportedFiles export_weights(Source& source, const std::string& folder, const ExportOptions& options) {
  require(options.max_shard_bytes > 0, "export: expected max_shard_bytes above 0, found ", options.max_shard_bytes);
  const std::vector<ExportItem> items = items_of(source, options);
  const std::vector<Shard> shards = shards_of(items, options.max_shard_bytes);
  const bool single = shards.size() == 1;
  std::error_code failure;
  fs::create_directories(folder, failure);
  require<IoError>(fs::is_directory(folder), folder, ": cannot make this folder: ", SystemReason(failure));

  ExportedFiles result{.files = {}, .tensors = static_cast<int64_t>(items.size()), .bytes = 0};
  std::deque<SafetensorsWriter> writers;  // none has its name before all are written
  for (const Shard& shard : shards) {
    result.files.push_back(
        single ? kWeightFile
               : shard_name(static_cast<int64_t>(writers.size()) + 1, static_cast<int64_t>(shards.size())));
    const std::string path = (fs::path(folder) / result.files.back()).string();
    SafetensorsWriter& writer = begin_shard(writers, path, shard, metadata_of(source, shard, options));
    for (const ExportItem* item : shard.items) write_item(source, *item, writer);
    result.bytes += shard.bytes;
  }
  // An old index must not name new shards.
  if (!single) remove_file(fs::path(folder) / kWeightIndex);
  for (SafetensorsWriter& writer : writers) writer.commit();
  if (!single) {
    result.files.emplace_back(kWeightIndex);
    AtomicFile index((fs::path(folder) / kWeightIndex).string());
    const std::string text = index_text(shards, result.bytes);
    index.write(text.data(), text.size());
    index.commit();
  }
  remove_leftovers(folder, result.files);
  return result;
}

ExportedFiles export_module(Source& source, const std::string& path, const ExportOptions& options,
                            const std::vector<std::string>& empty_modules) {
  ExportOptions all_names = options;
  all_names.keep_aliases = true;
  std::map<std::string, at::Tensor> values;  // by path: one for all names of a tied parameter
  std::vector<ModuleTensor> tensors;
  ExportedFiles result{.files = {fs::path(path).filename().string()}, .tensors = 0, .bytes = 0};
  for (const ExportItem& item : items_of(source, all_names)) {
    at::Tensor& whole = values[item.path];
    if (!whole.defined()) {
      whole = converted(source, item, source.tensor(item.path));
      result.bytes += item.bytes;
    }
    tensors.push_back({item.name, whole, item.path.starts_with("buffers/")});
    ++result.tensors;
  }
  std::vector<std::string> modules;
  for (const std::string& module : empty_modules) modules.push_back(renamed(options, module));
  write_module_file(path, tensors, modules);
  return result;
}

namespace {

std::vector<PlannedPiece> share_of(const Source& source, int rank, int ranks) {
  std::vector<PlannedPiece> pieces;
  for (const auto& [path, tensor] : source.tensors()) {
    const int64_t begin = tensor.numel() * rank / ranks;
    const int64_t end = tensor.numel() * (rank + 1) / ranks;
    if (begin < end || (rank == 0 && tensor.numel() == 0)) pieces.push_back({path, tensor, begin, end - begin});
  }
  return pieces;
}

}  // namespace

void rewrite(Source& source, const std::string& folder, int ranks) {
  require(ranks > 0, "checkpoint: rewrite: expected a positive number of ranks, found ", ranks);
  std::filesystem::path path = std::filesystem::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "tag/"
  SaveTarget target{.save = new_save(path.parent_path().string(), path.filename().string()), .ranks = ranks};
  begin_tag(target.save);
  try {
    for (target.rank = ranks - 1; target.rank >= 0; --target.rank) {
      SaveJob job(target);
      const std::vector<PlannedPiece> pieces = share_of(source, target.rank, ranks);
      job.open(pieces);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const at::Tensor values = at::empty({pieces[i].length}, pieces[i].tensor.dtype);
        source.read(pieces[i].path, pieces[i].offset, values);
        job.write(i, values);
      }
      job.finish();
      if (target.rank == 0) job.publish(source.state(), source.aliases(), std::chrono::milliseconds(0));
    }
  } catch (...) {
    abandon_tag(target.save);
    throw;
  }
}

}  // namespace ds::checkpoint
