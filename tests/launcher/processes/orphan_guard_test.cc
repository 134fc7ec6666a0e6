#include "launcher/processes/orphan_guard.h"

#include <gtest/gtest.h>

namespace ds::launcher {
namespace {

using namespace std::string_view_literals;

TEST(OrphanGuard, KnowsAnEnvironmentByItsLaunchId) {
  EXPECT_TRUE(carries_launch_id("A=1\0DS_LAUNCH_ID=7.5\0B=2\0"sv, "7.5"));
  EXPECT_TRUE(carries_launch_id("DS_LAUNCH_ID=1.1,7.5"sv, "7.5"));  // a launch inside a launch
  EXPECT_TRUE(carries_launch_id("DS_LAUNCH_ID=7.5,8.0\0"sv, "7.5"));
  EXPECT_FALSE(carries_launch_id("DS_LAUNCH_ID=7.55\0"sv, "7.5"));
  EXPECT_FALSE(carries_launch_id("DS_LAUNCH_ID=17.5\0"sv, "7.5"));
  EXPECT_FALSE(carries_launch_id("OLD_DS_LAUNCH_ID=7.5\0DS_LAUNCH_IDS=7.5\0"sv, "7.5"));
  EXPECT_FALSE(carries_launch_id(""sv, "7.5"));
}

}  // namespace
}  // namespace ds::launcher
