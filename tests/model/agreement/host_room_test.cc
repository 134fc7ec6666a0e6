// Whether the hosts of a job have room for what their ranks need together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/check.h"
#include "model/agreement/host_room.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kGiB = int64_t{1} << 30;

struct SimulatedRank {
  std::string host;
  int64_t bytes;
  int64_t room = 10 * kGiB;  // of its host
};

// What each rank is told; empty: there is room.
std::vector<std::string> refusals(const std::vector<SimulatedRank>& ranks) {
  std::vector<std::string> texts(ranks.size());
  test::run_ranks(static_cast<int>(ranks.size()), [&](comm::Communicator& world) {
    const SimulatedRank& own = ranks[static_cast<size_t>(world.rank())];
    const RankHost host = {"domain of " + own.host, own.host, {.of_host = {{own.room, "MemAvailable"}}}};
    try {
      require_room_on_hosts(own.bytes, "something (its.key)", at::kCPU, world, host);
    } catch (const ConfigError& error) {
      texts[static_cast<size_t>(world.rank())] = error.what();
    }
  });
  return texts;
}

TEST(HostRoom, RanksOfAHostTakeTogether) {
  EXPECT_THAT(refusals({{"a", 5 * kGiB}, {"a", 5 * kGiB}}), Each(IsEmpty()));
  EXPECT_THAT(refusals({{"a", 5 * kGiB}, {"a", 6 * kGiB}}),
              ElementsAre(HasSubstr("needs 5.0 GiB on this rank, 11.0 GiB on all ranks of this host (2), available "
                                    "are 10.0 GiB (MemAvailable)"),
                          HasSubstr("needs 6.0 GiB on this rank, 11.0 GiB on all ranks of this host (2)")));
  EXPECT_THAT(refusals({{"a", 10 * kGiB}}), Each(IsEmpty()));
  EXPECT_THAT(refusals({{"a", 11 * kGiB}}), Each(HasSubstr("on all ranks of this host (1)")));
}

TEST(HostRoom, HostsMayHaveDifferentNumbersOfRanksInAnyOrder) {
  const int64_t third = 10 * kGiB / 3;
  EXPECT_THAT(refusals({{"a", third}, {"b", 10 * kGiB}, {"a", third}, {"a", third}}), Each(IsEmpty()));
  EXPECT_THAT(refusals({{"a", third}, {"b", third}, {"a", third}, {"b", third}, {"a", third}, {"a", third}}),
              ElementsAre(HasSubstr("this host (4)"), HasSubstr("host a has no room"), HasSubstr("this host (4)"),
                          HasSubstr("host a has no room"), HasSubstr("this host (4)"), HasSubstr("this host (4)")));
}

TEST(HostRoom, RanksThatNeedLittleDoNotCountAsThoseThatNeedMuch) {
  EXPECT_THAT(refusals({{"a", 9 * kGiB}, {"a", kGiB / 2}, {"a", kGiB / 2}}), Each(IsEmpty()));
}

TEST(HostRoom, AHostWithoutRoomIsNamedOnEveryRank) {
  const auto texts =
      refusals({{"a", kGiB}, {std::string(100, 'b'), kGiB}, {std::string(100, 'b'), kGiB, 2 * kGiB - 1}});
  EXPECT_THAT(texts[0], AllOf(HasSubstr("something (its.key)"), HasSubstr(std::string(63, 'b')), HasSubstr("rank 2"),
                              HasSubstr("this is rank 0 on a")));
  EXPECT_THAT(texts[1], HasSubstr("has no room for rank 2"));
  EXPECT_THAT(texts[2], HasSubstr("2.0 GiB on all ranks of this host (2)"));
}

}  // namespace
}  // namespace ds::engine
