// Checksums of data in blocks, so that any part of a tensor can be checked without reading the rest. XXH3, 64 bits
// (xxhash.com).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ds::checkpoint {

inline constexpr size_t kChecksumBlock = size_t{1} << 20;  // bytes; the last block of a run is shorter

uint64_t checksum(const void* data, size_t bytes);
// The checksums of the kChecksumBlock-sized blocks of a run of data, in order.
std::vector<uint64_t> block_checksums(const void* data, size_t bytes);
// 16 hexadecimal digits and back. from_hex throws IoError that begins with `where`.
std::string to_hex(uint64_t value);
uint64_t from_hex(const std::string& text, const std::string& where);

}  // namespace ds::checkpoint
