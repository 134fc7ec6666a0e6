#include "checkpoint/block_checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>

#include "core/check.h"

namespace ds::checkpoint {

uint64_t checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

std::vector<uint64_t> block_checksums(const void* data, size_t bytes) {
  std::vector<uint64_t> result;
  for (size_t at = 0; at < bytes; at += kChecksumBlock) {
    result.push_back(checksum(static_cast<const char*>(data) + at, std::min(kChecksumBlock, bytes - at)));
  }
  return result;
}

std::string to_hex(uint64_t value) {
  constexpr int kDigits = 16;
  std::string text(kDigits, '0');
  for (int i = kDigits - 1; i >= 0; --i, value >>= 4) text[static_cast<size_t>(i)] = "0123456789abcdef"[value & 15];
  return text;
}

uint64_t from_hex(const std::string& text, const std::string& where) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  require<IoError>(error == std::errc() && end == text.data() + text.size() && text.size() == 16, where,
                   ": expected a checksum of 16 hexadecimal digits, found \"", text, "\"");
  return value;
}

}  // namespace ds::checkpoint
