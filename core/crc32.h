// Cyclic redundancy checks of 32 bits, as file formats ask for them. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace ds {

// The polynomials, bits reversed: the lowest one stands for x^31.
enum class Crc32Polynomial : uint32_t {
  kIeee = 0xedb88320,        // zip, gzip, PNG: "123456789" has 0xcbf43926
  kCastagnoli = 0x82f63b78,  // CRC-32C, of iSCSI and TFRecord: "123456789" has 0xe3069283
};

// The remainder for each value of one byte.
template <Crc32Polynomial kPolynomial>
constexpr std::array<uint32_t, 256> crc32_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ ((sum & 1) != 0 ? static_cast<uint32_t>(kPolynomial) : 0);
    table[byte] = sum;
  }
  return table;
}

// Computes the checksum of `bytes`, which starts from all ones and is inverted at the end. Takes one byte at a time:
// meant for headers and small records.
template <Crc32Polynomial kPolynomial>
uint32_t crc32(std::span<const uint8_t> bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc32_table<kPolynomial>();
  uint32_t sum = 0xffffffff;
  for (const uint8_t byte : bytes) sum = sum >> 8 ^ kTable[(sum ^ byte) & 0xff];
  return ~sum;
}

}  // namespace ds
