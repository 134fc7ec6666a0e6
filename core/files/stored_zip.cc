#include "core/files/stored_zip.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/crc32.h"

namespace ds {
namespace {

// PKWARE's APPNOTE, sections 4.3 and 4.5. Numbers are little-endian.
constexpr uint64_t kLocalHeader = 0x04034b50, kLocalHeaderBytes = 30;
constexpr uint64_t kEntry = 0x02014b50, kEntryBytes = 46;
constexpr uint64_t kEnd = 0x06054b50, kEndBytes = 22, kLongestComment = 65535;
constexpr uint64_t kWideEnd = 0x06064b50, kWideEndBytes = 56;
constexpr uint64_t kWideLocator = 0x07064b50, kWideLocatorBytes = 20;
constexpr uint64_t kDescriptor = 0x08074b50, kHasDescriptor = 8;
constexpr uint64_t kWideField = 1, kInWideField = 0xffffffff;

constexpr const char* kDamaged = ": the file is damaged; copy it again, or load another checkpoint";

uint64_t number_at(std::span<const uint8_t> bytes, size_t at, size_t count) {
  uint64_t number = 0;
  for (size_t i = count; i-- > 0;) number = number << 8 | bytes[at + i];
  return number;
}

}  // namespace

StoredZip::StoredZip(const std::string& path) : path_(path), file_(path) { read_directory(find_directory()); }

void StoredZip::fail(const std::string& what) const { throw IoError(cat(path_, ": ", what)); }

std::span<const uint8_t> StoredZip::part(uint64_t begin, uint64_t count, const char* what) const {
  const auto bytes = file_.bytes();
  if (begin > bytes.size() || count > bytes.size() - begin) {
    fail(cat(what, " of ", count, " bytes at ", begin, " in a file of ", bytes.size(), " bytes", kDamaged));
  }
  return bytes.subspan(begin, count);
}

StoredZip::Directory StoredZip::find_directory() const {
  const auto bytes = file_.bytes();
  const uint64_t first = bytes.size() > kEndBytes + kLongestComment ? bytes.size() - kEndBytes - kLongestComment : 0;
  for (uint64_t at = bytes.size() >= kEndBytes ? bytes.size() - kEndBytes + 1 : 0; at-- > first;) {
    if (number_at(bytes, at, 4) != kEnd) continue;
    const Directory directory{.begin = number_at(bytes, at + 16, 4), .bytes = number_at(bytes, at + 12, 4)};
    const bool wide =
        directory.begin == kInWideField || directory.bytes == kInWideField || number_at(bytes, at + 10, 2) == 0xffff;
    return wide ? wide_directory(at) : directory;
  }
  if (bytes.size() > 1 && bytes[0] == 0x80 && bytes[1] <= 5) {
    fail("written by torch.save in the format before torch 1.6; load it in Python and save it again");
  }
  fail(cat("no end of a zip directory in its ", bytes.size(),
           " bytes; expected a file of torch.save: it is truncated, damaged or something else; copy it again, or name "
           "another"));
}

StoredZip::Directory StoredZip::wide_directory(uint64_t end_record) const {
  if (end_record < kWideLocatorBytes) fail(cat("no zip64 directory", kDamaged));
  const auto locator = part(end_record - kWideLocatorBytes, kWideLocatorBytes, "zip64 locator");
  if (number_at(locator, 0, 4) != kWideLocator) fail(cat("no zip64 directory", kDamaged));
  const auto end = part(number_at(locator, 8, 8), kWideEndBytes, "zip64 directory end");
  if (number_at(end, 0, 4) != kWideEnd) fail(cat("no zip64 directory", kDamaged));
  return {.begin = number_at(end, 48, 8), .bytes = number_at(end, 40, 8)};
}

void StoredZip::read_directory(const Directory& directory) {
  part(directory.begin, directory.bytes, "zip directory");
  const uint64_t end = directory.begin + directory.bytes;
  uint64_t at = directory.begin;
  while (at < end) at = read_entry(at);
  if (at != end) fail(cat("its zip directory ends inside an entry", kDamaged));
}

uint64_t StoredZip::read_entry(uint64_t at) {
  const auto entry = part(at, kEntryBytes, "zip directory entry");
  if (number_at(entry, 0, 4) != kEntry) fail(cat("no zip directory entry at byte ", at, kDamaged));
  const uint64_t name_bytes = number_at(entry, 28, 2);
  const uint64_t extra_bytes = number_at(entry, 30, 2);
  const auto name_part = part(at + kEntryBytes, name_bytes, "name of a record");
  const std::string name(reinterpret_cast<const char*>(name_part.data()), name_part.size());
  std::array<uint64_t, 3> numbers = {number_at(entry, 24, 4), number_at(entry, 20, 4), number_at(entry, 42, 4)};
  const auto extra = part(at + kEntryBytes + name_bytes, extra_bytes, "extra field");
  for (uint64_t field = 0; field + 4 <= extra.size(); field += 4 + number_at(extra, field + 2, 2)) {
    if (number_at(extra, field, 2) != kWideField) continue;
    const uint64_t end = std::min<uint64_t>(extra.size(), field + 4 + number_at(extra, field + 2, 2));
    uint64_t next = field + 4;
    for (uint64_t& number : numbers) {
      if (number != kInWideField || next + 8 > end) continue;
      number = number_at(extra, next, 8);
      next += 8;
    }
  }
  const auto& [bytes, stored_bytes, header] = numbers;
  const uint64_t next_entry = at + kEntryBytes + name_bytes + extra_bytes + number_at(entry, 32, 2);
  const bool is_stored = number_at(entry, 10, 2) == 0;
  // Code that LibTorch's torch::save puts beside the values of a module: compressed, and never read here.
  if (!is_stored && name.find("/code/") != std::string::npos) return next_entry;
  if (!is_stored || (number_at(entry, 8, 2) & 1) != 0 || bytes != stored_bytes) {
    fail(cat("record \"", name,
             "\" is compressed or encrypted, which torch.save never does; load it in Python and save it again"));
  }
  const Record record{.bytes = data_of(name, header, bytes),
                      .checksum = static_cast<uint32_t>(number_at(entry, 16, 4)),
                      .entry = at,
                      .header = header};
  if (!records_.emplace(name, record).second) fail(cat("record \"", name, "\" is there twice", kDamaged));
  return next_entry;
}

std::span<const uint8_t> StoredZip::data_of(const std::string& name, uint64_t header, uint64_t count) const {
  const auto local = part(header, kLocalHeaderBytes, "header of a record");
  if (number_at(local, 0, 4) != kLocalHeader)
    fail(cat("no header of record \"", name, "\" at byte ", header, kDamaged));
  const uint64_t begin = header + kLocalHeaderBytes + number_at(local, 26, 2) + number_at(local, 28, 2);
  return part(begin, count, "record");
}

const StoredZip::Record& StoredZip::find(const std::string& name) const {
  const auto found = records_.find(name);
  if (found == records_.end()) fail(cat("no record \"", name, "\" among its ", records_.size()));
  return found->second;
}

uint64_t StoredZip::position(const std::string& name) const {
  return static_cast<uint64_t>(find(name).bytes.data() - file_.bytes().data());
}

std::vector<uint64_t> StoredZip::checksum_positions(const std::string& name) const {
  const Record& record = find(name);
  if (record.checksum == 0) return {};
  std::vector<uint64_t> positions = {record.entry + 16};
  const auto local = part(record.header, kLocalHeaderBytes, "header of a record");
  if (number_at(local, 14, 4) != 0) positions.push_back(record.header + 14);
  if ((number_at(local, 6, 2) & kHasDescriptor) != 0) {
    const uint64_t end = position(name) + record.bytes.size();
    const bool marked = number_at(part(end, 4, "descriptor of a record"), 0, 4) == kDescriptor;
    positions.push_back(marked ? end + 4 : end);
  }
  for (const uint64_t at : positions) {
    if (number_at(part(at, 4, "checksum"), 0, 4) != record.checksum) {
      fail(cat("record \"", name, "\" has several checksums", kDamaged));
    }
  }
  return positions;
}

void StoredZip::check_sum(const std::string& name) const {
  const Record& record = find(name);
  if (record.checksum != 0 && crc32<Crc32Polynomial::kIeee>(record.bytes) != record.checksum) {
    fail(cat("record \"", name, "\" does not have its checksum", kDamaged));
  }
}

std::vector<std::string> StoredZip::names() const {
  std::vector<std::string> result;
  for (const auto& [name, record] : records_) result.push_back(name);
  return result;
}

std::string StoredZip::name_ending(const std::string& end) const {
  const auto found =
      std::find_if(records_.begin(), records_.end(), [&end](const auto& entry) { return entry.first.ends_with(end); });
  return found == records_.end() ? std::string() : found->first;
}

}  // namespace ds
