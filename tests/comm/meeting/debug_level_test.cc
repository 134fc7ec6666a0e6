#include "comm/meeting/debug_level.h"

#include <gmock/gmock.h>

#include "tests/comm/meeting/variables.h"

namespace ds::comm {
namespace {

DebugLevel level_of(const std::string& value) { return debug_level(reader_of({{"TORCH_DISTRIBUTED_DEBUG", value}})); }

TEST(DebugLevel, IsThatOfLibTorch) {
  EXPECT_EQ(debug_level(reader_of({})), DebugLevel::kOff);
  EXPECT_EQ(level_of("OFF"), DebugLevel::kOff);
  EXPECT_EQ(level_of("INFO"), DebugLevel::kInfo);
  EXPECT_EQ(level_of("DETAIL"), DebugLevel::kDetail);
  EXPECT_EQ(level_of("detail"), DebugLevel::kDetail);
  EXPECT_THAT(config_error_of([] { level_of("LOUD"); }), ::testing::HasSubstr("expected OFF, INFO or DETAIL"));
}

}  // namespace
}  // namespace ds::comm
