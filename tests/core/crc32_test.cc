#include "core/crc32.h"

#include <gtest/gtest.h>

namespace ds {
namespace {

constexpr std::array<uint8_t, 9> kDigits = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};

// The check values of the catalogue at reveng.sourceforge.io: CRC-32/ISO-HDLC and CRC-32/ISCSI.
TEST(Crc32, KnownValues) {
  EXPECT_EQ(crc32<Crc32Polynomial::kIeee>(kDigits), 0xcbf43926U);
  EXPECT_EQ(crc32<Crc32Polynomial::kCastagnoli>(kDigits), 0xe3069283U);
  EXPECT_EQ(crc32<Crc32Polynomial::kIeee>({}), 0U);
}

}  // namespace
}  // namespace ds
