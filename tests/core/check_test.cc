#include "core/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ds {
namespace {

using testing::HasSubstr;

TEST(Check, RequireJoinsThePartsOfTheMessage) {
  try {
    require<ConfigError>(1 + 1 == 3, "expected ", 3, ", found ", 2);
    FAIL() << "did not throw";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "expected 3, found 2");
  }
  EXPECT_NO_THROW(require(true, "unused"));
}

TEST(Check, EnsureNamesTheInvariantAndThePlace) {
  try {
    ensure(false, "buckets are sorted");
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("buckets are sorted"));
    EXPECT_THAT(error.what(), HasSubstr("check_test.cc"));
  }
}

}  // namespace
}  // namespace ds
