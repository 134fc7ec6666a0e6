#include "core/crc32.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

namespace ds {
namespace {

constexpr std::array<uint8_t, 9> kDigits = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};

// The check values of the catalogue at reveng.sourceforge.io: CRC-32/ISO-HDLC and CRC-32/ISCSI.
TEST(Crc32, KnownValues) {
  EXPECT_EQ(crc32<Crc32Polynomial::kIeee>(kDigits), 0xcbf43926U);
  EXPECT_EQ(crc32<Crc32Polynomial::kCastagnoli>(kDigits), 0xe3069283U);
  EXPECT_EQ(crc32<Crc32Polynomial::kIeee>({}), 0U);
}

// A bit at a time, as the definition has it.
TEST(Crc32, OfAnyLengthIsTheDefinition) {
  std::vector<uint8_t> bytes;
  for (uint32_t length = 0; length < 40; ++length) {
    uint32_t sum = 0xffffffff;
    for (const uint8_t byte : bytes) {
      sum ^= byte;
      for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ ((sum & 1) != 0 ? 0xedb88320U : 0);
    }
    EXPECT_EQ(crc32<Crc32Polynomial::kIeee>(bytes), ~sum) << length;
    bytes.push_back(static_cast<uint8_t>(length * 67 + 201));
  }
}

}  // namespace
}  // namespace ds
