#include "comm/meeting/process_state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/grouped_locale.h"

namespace ds::comm {
namespace {

// Under a locale that groups digits there was no /proc/12.345, and a living rank was taken for one that is gone.
TEST(ProcessState, IsReadUnderEveryLocale) {
  const uint64_t start = start_of_process(getpid());
  EXPECT_GT(start, 0U);
  const test::GroupedLocale locale;
  EXPECT_EQ(state_of_process(getpid()), 'R');
  EXPECT_EQ(start_of_process(getpid()), start);
}

}  // namespace
}  // namespace ds::comm
