// Cyclic redundancy checks of 32 bits, as file formats ask for them. Torch-free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ds {

// The polynomials, bits reversed: the lowest one stands for x^31.
enum class Crc32Polynomial : uint32_t {
  kIeee = 0xedb88320,        // zip, gzip, PNG: "123456789" has 0xcbf43926
  kCastagnoli = 0x82f63b78,  // CRC-32C, of iSCSI and TFRecord: "123456789" has 0xe3069283
};

// The remainders for each value of one byte that as many bytes of zeros follow as the table's number.
template <Crc32Polynomial kPolynomial>
constexpr std::array<std::array<uint32_t, 256>, 8> crc32_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ ((sum & 1) != 0 ? static_cast<uint32_t>(kPolynomial) : 0);
    tables[0][byte] = sum;
  }
  for (size_t i = 1; i < tables.size(); ++i) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[i - 1][byte];
      tables[i][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

// Computes the checksum of `bytes`, which starts from all ones and is inverted at the end. Takes eight bytes at a time
// (Kounavis and Berry, "A systematic approach to building high performance, software-based, CRC generators", 2005).
template <Crc32Polynomial kPolynomial>
uint32_t crc32(std::span<const uint8_t> bytes) {
  static constexpr auto kTables = crc32_tables<kPolynomial>();
  uint32_t sum = 0xffffffff;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    uint32_t next = 0;
    for (size_t i = 0; i < 4; ++i) next ^= kTables[7 - i][(sum >> 8 * i ^ bytes[i]) & 0xff];
    for (size_t i = 4; i < 8; ++i) next ^= kTables[7 - i][bytes[i]];
    sum = next;
  }
  for (const uint8_t byte : bytes) sum = sum >> 8 ^ kTables[0][(sum ^ byte) & 0xff];
  return ~sum;
}

}  // namespace ds
