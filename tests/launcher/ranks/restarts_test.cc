// How restarts are counted.
#include "launcher/ranks/restarts.h"

#include <fcntl.h>
#include <gmock/gmock.h>

#include "core/unique_fd.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;

TEST(Restarts, OnlyFailuresUseThemUp) {
  const UniqueFd nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
  Console console(nowhere.get(), nowhere.get());
  Notices notices(console, Verbosity::kError);
  Restarts restarts(1);
  EXPECT_THAT(restarts.entries(),
              ElementsAre("DS_RESTART_COUNT=0", "TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_MAX_RESTARTS=1"));
  restarts.with_other_hosts();
  EXPECT_TRUE(restarts.after_failure(notices));
  restarts.with_other_hosts();
  EXPECT_THAT(restarts.entries(),
              ElementsAre("DS_RESTART_COUNT=3", "TORCHELASTIC_RESTART_COUNT=1", "TORCHELASTIC_MAX_RESTARTS=1"));
  EXPECT_FALSE(restarts.after_failure(notices));
  EXPECT_EQ(restarts.starts(), 3);
}

}  // namespace
}  // namespace ds::launcher
