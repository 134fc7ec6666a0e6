// A library beside a LibTorch of another minor version is told apart, and says what to do.
#include <gmock/gmock.h>
#include <torch/headeronly/version.h>

#include "core/check.h"
#include "core/torch_version/loaded_torch.h"

namespace ds {
namespace {

TEST(LoadedTorch, SaysItsVersion) { EXPECT_EQ(loaded_torch_version(), TORCH_VERSION); }

TEST(LoadedTorch, MayDifferInTheLastNumberOnly) {
  EXPECT_NO_THROW(require_same_torch_minor("2.11.0", "2.11.1"));
  EXPECT_NO_THROW(require_same_torch_minor("2.11.0", "2.11.0a0+git70d99e9"));
  EXPECT_NO_THROW(require_same_torch_minor("2.11.0", ""));
  for (const char* other : {"2.12.0", "2.1.1", "3.11.0"}) {
    EXPECT_THROW(require_same_torch_minor("2.11.0", other), ConfigError) << other;
  }
}

TEST(LoadedTorch, AnotherMinorIsNamedWithTheWaysOut) {
  try {
    require_same_torch_minor("2.11.0", "2.12.1");
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr("compiled for LibTorch 2.11, and this process has loaded LibTorch 2.12.1"));
    EXPECT_THAT(error.what(), testing::HasSubstr("build or install dsengine for LibTorch 2.12"));
  }
}

}  // namespace
}  // namespace ds
