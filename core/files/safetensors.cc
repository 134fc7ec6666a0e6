#include "core/files/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "core/json/json_depth.h"
#include "core/json/parse_json.h"
#include "core/tensor_check.h"

namespace ds {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr const char* kMetadataKey = "__metadata__";

struct DtypeName {
  const char* name;
  at::ScalarType dtype;
};

// Ascending in the order that the reference implementation sorts by (descending in the file).
constexpr std::array kDtypes = {
    DtypeName{"BOOL", at::kBool}, DtypeName{"U8", at::kByte},   DtypeName{"I8", at::kChar},
    DtypeName{"I16", at::kShort}, DtypeName{"F16", at::kHalf},  DtypeName{"BF16", at::kBFloat16},
    DtypeName{"I32", at::kInt},   DtypeName{"F32", at::kFloat}, DtypeName{"F64", at::kDouble},
    DtypeName{"I64", at::kLong},
};

// Position in kDtypes.
size_t rank_of(const std::string& tensor_name, at::ScalarType dtype) {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (dtype == kDtypes[i].dtype) return i;
  }
  throw UsageError(cat("safetensors: tensor \"", tensor_name, "\" is ", dtype,
                       ", which the format does not hold; convert it to float32, float64, float16, bfloat16, int8 to "
                       "int64, uint8 or bool"));
}

bool is_list_of_naturals(const json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(), [](const json& item) {
           return item.is_number_unsigned() && item.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
         });
}

// Bytes of a tensor, or nothing when they do not fit an int64; nor may they without sizes of 0, for strides are
// computed without these.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end() ? 0 : static_cast<uint64_t>(bytes);
}

SafetensorsFile::Entry parse_entry(const std::string& where, const std::string& name, const json& value) {
  require<IoError>(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") &&
                       value.contains("data_offsets"),
                   where, "expected {dtype, shape, data_offsets}, found ", value);
  require<IoError>(value["dtype"].is_string(), where, "expected dtype to be a string, found ", value["dtype"]);
  const auto dtype = safetensors_dtype(value["dtype"]);
  require<IoError>(dtype.has_value(), where, "dtype ", value["dtype"],
                   " is not one of F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL");
  require<IoError>(is_list_of_naturals(value["shape"]), where, "expected shape to be a list of integers >= 0, found ",
                   value["shape"]);
  const json& offsets = value["data_offsets"];
  require<IoError>(is_list_of_naturals(offsets) && offsets.size() == 2 && offsets[0] <= offsets[1], where,
                   "expected data_offsets to be [begin, end] with begin <= end, found ", offsets);
  SafetensorsFile::Entry entry{name, *dtype, value["shape"].get<std::vector<int64_t>>(), offsets[0].get<size_t>(),
                               offsets[1].get<size_t>()};
  const auto bytes = bytes_of(entry.sizes, entry.dtype);
  require<IoError>(bytes == entry.end - entry.begin, where, "a ", value["dtype"].get_ref<const std::string&>(),
                   " tensor of shape ", value["shape"], " has ", lazy([&] { return bytes ? cat(*bytes) : "too many"; }),
                   " bytes, its data_offsets span ", entry.end - entry.begin);
  return entry;
}

}  // namespace

const char* safetensors_name(at::ScalarType dtype) {
  for (const DtypeName& entry : kDtypes) {
    if (dtype == entry.dtype) return entry.name;
  }
  throw UsageError(cat("safetensors: the format does not hold ", dtype));
}

bool safetensors_holds(at::ScalarType dtype) {
  return std::any_of(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& known) { return known.dtype == dtype; });
}

std::optional<at::ScalarType> safetensors_dtype(const std::string& name) {
  for (const DtypeName& entry : kDtypes) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(std::make_shared<MappedFile>(path)) {
  const std::span<const uint8_t> bytes = file_->bytes();
  require<IoError>(bytes.size() >= kLengthBytes, path_, ": not a safetensors file: expected at least ", kLengthBytes,
                   " bytes, found ", bytes.size());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  require<IoError>(header_bytes <= kMaxHeaderBytes, path_,
                   ": not a safetensors file: its first 8 bytes announce a header of ", header_bytes,
                   " bytes, expected at most ", kMaxHeaderBytes);
  require<IoError>(header_bytes <= bytes.size() - kLengthBytes, path_, ": truncated: expected a header of ",
                   header_bytes, " bytes, found ", bytes.size() - kLengthBytes,
                   "; the file was not copied or written to its end");
  data_begin_ = kLengthBytes + header_bytes;
  parse_header({reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, header_bytes});
  check_layout(bytes.size() - data_begin_);
}

void SafetensorsFile::parse_header(const std::string& header) {
  require<IoError>(header.starts_with('{'), path_, ": not a safetensors file: expected the header to start with '{'");
  require<IoError>(!is_deep_json(header), path_, ": not a safetensors file: its header is nested more than ",
                   kDeepestJson, " deep");
  json parsed;
  try {
    parsed = parse_json<json>(header);
  } catch (const json::exception& error) {
    throw IoError(cat(path_, ": the header is not JSON: ", error.what()));
  }
  const std::optional<std::string> duplicate = find_duplicate_key(header);
  require<IoError>(!duplicate, path_, ": the header names \"", duplicate.value_or(""), "\" twice");
  for (const auto& [name, value] : parsed.items()) {
    const std::string where = cat(path_, ": tensor \"", name, "\": ");
    if (name == kMetadataKey) {
      const bool valid = value.is_object() &&
                         std::all_of(value.begin(), value.end(), [](const json& item) { return item.is_string(); });
      require<IoError>(valid, path_, ": expected __metadata__ to map strings to strings, found ", value);
      metadata_ = value.get<std::map<std::string, std::string>>();
    } else {
      entries_.push_back(parse_entry(where, name, value));
    }
  }
}

void SafetensorsFile::check_layout(size_t data_bytes) {
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  size_t position = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    require<IoError>(entry.end <= data_bytes, path_, ": truncated: tensor \"", entry.name, "\" ends at byte ",
                     entry.end, " of the data, found ", data_bytes,
                     " bytes; the file was not copied or written to its end");
    require<IoError>(entry.begin == position, path_, ": tensor \"", entry.name, "\" begins at byte ", entry.begin,
                     " of the data, expected ", position,
                     entry.begin < position ? " (it overlaps" : " (there is a hole after",
                     lazy([&] { return i == 0 ? " the header)" : cat(" \"", entries_[i - 1].name, "\")"); }));
    position = entry.end;
    index_[entry.name] = i;
  }
  require<IoError>(position == data_bytes, path_, ": expected ", position, " bytes of data, found ", data_bytes,
                   "; bytes after the last tensor belong to none");
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = index_.find(name);
  require<IoError>(found != index_.end(), path_, ": no tensor \"", name, "\" among its ", entries_.size(), " tensors");
  const Entry& entry = entries_[found->second];
  uint8_t* data = file_->bytes().data() + data_begin_ + entry.begin;
  const size_t misaligned = reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry.dtype);
  if (misaligned != 0) {
    at::Tensor copy = at::empty(entry.sizes, entry.dtype);
    std::memcpy(copy.mutable_data_ptr(), data, entry.end - entry.begin);
    return copy;
  }
  return at::from_blob(
      data, entry.sizes, [file = file_](void*) {}, entry.dtype);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<Header>& headers,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  std::vector<std::pair<size_t, const Header*>> items;  // with the rank of the dtype
  for (const Header& header : headers) {
    items.emplace_back(rank_of(header.name, header.dtype), &header);
    const bool is_new = places_.emplace(header.name, Place{.dtype = header.dtype, .sizes = header.sizes}).second;
    require(header.name != kMetadataKey && is_new, "safetensors: the name \"", header.name,
            "\" is given twice or reserved");
  }
  std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second->name < b.second->name;
  });
  std::string text = "{";
  if (!metadata.empty()) text += cat("\"", kMetadataKey, "\":", json(metadata).dump());
  size_t position = 0;
  for (const auto& [dtype, header] : items) {
    const size_t end = position + bytes_of(header->sizes, header->dtype).value_or(0);
    text += cat(text.size() > 1 ? "," : "", json(header->name).dump(), ":{\"dtype\":\"", kDtypes[dtype].name,
                "\",\"shape\":", json(header->sizes).dump(), ",\"data_offsets\":[", position, ",", end, "]}");
    Place& place = places_.at(header->name);
    place.begin = position;
    place.end = end;
    place.missing = end - position;
    place.written = place.missing == 0;
    position = end;
  }
  text += '}';
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t header_bytes = text.size();
  header_.assign(reinterpret_cast<const char*>(&header_bytes), kLengthBytes);
  header_ += text;
  file_.write(header_.data(), header_.size());
  bytes_ = header_.size() + position;
  for (auto& [name, place] : places_) {
    place.begin += header_.size();
    place.end += header_.size();
  }
}

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto found = places_.find(name);
  require(found != places_.end() && (!found->second.written || found->second.begin == found->second.end),
          "safetensors: tensor \"", name, "\" was not announced or is written twice");
  Place& place = found->second;
  require(tensor.defined() && tensor.scalar_type() == place.dtype && tensor.sizes() == at::IntArrayRef(place.sizes),
          "safetensors: tensor \"", name, "\": expected ", place.dtype, " ", at::IntArrayRef(place.sizes), ", found ",
          describe(tensor));
  const at::Tensor contiguous = tensor.detach().to(at::kCPU).contiguous();
  file_.write_at(place.begin, contiguous.const_data_ptr(), contiguous.nbytes());
  place.written = true;
}

void SafetensorsWriter::write_bytes(const std::string& name, size_t position, const void* data, size_t bytes) {
  const auto found = places_.find(name);
  require(found != places_.end(), "safetensors: tensor \"", name, "\" was not announced");
  Place& place = found->second;
  require(position <= place.end - place.begin && bytes <= place.end - place.begin - position && bytes <= place.missing,
          "safetensors: tensor \"", name, "\" of ", place.end - place.begin, " bytes: ", bytes, " bytes at ", position,
          " lie outside or were written before");
  file_.write_at(place.begin + position, data, bytes);
  place.missing -= bytes;
  place.written = place.missing == 0;
}

size_t SafetensorsWriter::position(const std::string& name) const {
  const auto found = places_.find(name);
  require(found != places_.end(), "safetensors: tensor \"", name, "\" was not announced");
  return found->second.begin;
}

void SafetensorsWriter::commit(bool durable) {
  for (const auto& [name, place] : places_)
    require(place.written, "safetensors: tensor \"", name, "\" was not written");
  file_.commit(durable);
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Header> headers;
  for (const auto& [name, tensor] : tensors) {
    require(tensor.defined(), "safetensors: tensor \"", name, "\" is undefined");
    headers.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, headers, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace ds
