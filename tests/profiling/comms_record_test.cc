#include "profiling/comms_record.h"

#include <gmock/gmock.h>

#include "profiling/comms_table.h"

namespace ds::profiling {
namespace {

using comm::CollectiveKind;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr double kTenMilliseconds = 0.01;
constexpr int64_t kMebibyte = 1 << 20;

CommsRecord record_of(CollectiveKind kind, const std::string& name, const std::vector<double>& seconds,
                      int64_t bytes = kMebibyte) {
  CommsRecord record{.operation = name, .kind = kind, .group = "world", .ranks = {0, 1}, .bytes = bytes};
  for (const double duration : seconds) record.end(record.launch(), duration, bytes);
  return record;
}

// Of the whole tensor, n ranks, time t: DeepSpeed's calc_bw_log.
TEST(Bandwidth, FollowsDeepSpeedsFormulas) {
  const double plain = 8.0 * kMebibyte / 1e9 / kTenMilliseconds;
  const auto of = [](CollectiveKind kind) { return bandwidth_of(kind, kMebibyte, 4, kTenMilliseconds); };
  EXPECT_DOUBLE_EQ(of(CollectiveKind::kAllReduce).algorithm, 2 * plain);
  EXPECT_DOUBLE_EQ(of(CollectiveKind::kAllReduce).bus, plain * 2 * 3 / 4);
  for (const CollectiveKind kind : {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
                                    CollectiveKind::kAllToAll, CollectiveKind::kGather, CollectiveKind::kScatter}) {
    EXPECT_DOUBLE_EQ(of(kind).algorithm, plain) << static_cast<int>(kind);
    EXPECT_DOUBLE_EQ(of(kind).bus, plain * 3 / 4) << static_cast<int>(kind);
  }
  for (const CollectiveKind kind :
       {CollectiveKind::kBroadcast, CollectiveKind::kReduce, CollectiveKind::kSend, CollectiveKind::kRecv}) {
    EXPECT_DOUBLE_EQ(of(kind).algorithm, plain) << static_cast<int>(kind);
    EXPECT_DOUBLE_EQ(of(kind).bus, plain) << static_cast<int>(kind);
  }
  EXPECT_EQ(bandwidth_of(CollectiveKind::kBarrier, 0, 4, kTenMilliseconds).bus, 0);
  EXPECT_EQ(bandwidth_of(CollectiveKind::kAllReduce, kMebibyte, 4, 0).bus, 0) << "no time";
}

TEST(CommsRecord, LeavesOutliersOutOfTheMean) {
  std::vector<double> seconds(18, 0.002);
  seconds.push_back(9);
  seconds.push_back(0);
  const CommsRecord record = record_of(CollectiveKind::kAllReduce, "all_reduce", seconds);
  EXPECT_NEAR(record.average_seconds(), 0.002, 1e-6);
  EXPECT_NEAR(record.seconds, 9 + 18 * 0.002, 1e-9) << "the total has them";
  EXPECT_EQ(record.count, 20);
}

TEST(CommsRecord, KeepsTheLatestTimesAlone) {
  CommsRecord record = record_of(CollectiveKind::kAllReduce, "all_reduce", std::vector<double>(CommsRecord::kKept, 1));
  const int64_t late = record.launch();
  for (size_t i = 0; i < CommsRecord::kKept; ++i) record.end(record.launch(), 3, kMebibyte);
  EXPECT_THAT(record.latest, SizeIs(CommsRecord::kKept));
  record.end(late, 100, kMebibyte);
  EXPECT_DOUBLE_EQ(record.average_seconds(), 3) << "its place has been given away";
  EXPECT_EQ(record.count, 2 * static_cast<int64_t>(CommsRecord::kKept) + 1);
}

TEST(CommsRecord, TravelsAsBytes) {
  CommsRecord record = record_of(CollectiveKind::kReduceScatter, "reduce_scatter | bucket 3", {0.5, 0.25});
  record.launch();
  const std::vector<CommsRecord> found = records_from_bytes(to_bytes({record}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].operation, record.operation);
  EXPECT_EQ(found[0].kind, record.kind);
  EXPECT_EQ(found[0].ranks, record.ranks);
  EXPECT_EQ(found[0].bytes, kMebibyte);
  EXPECT_EQ(found[0].launched, 3);
  EXPECT_EQ(found[0].count, 2);
  EXPECT_THAT(found[0].latest, ElementsAre(FloatEq(0.5), FloatEq(0.25), FloatEq(-1)));
}

// Rank 1 comes 30 ms late to the first and 10 ms to the second, rank 0 comes 5 ms late to the third.
TEST(Straggling, IsWhatARankWaitedLongerThanTheLastToCome) {
  const auto all_reduce = [](const std::vector<double>& seconds) {
    return record_of(CollectiveKind::kAllReduce, "all_reduce", seconds);
  };
  const auto found = compare_ranks({{all_reduce({0.031, 0.011, 0.001})}, {all_reduce({0.001, 0.001, 0.006})}});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].count, 3);
  EXPECT_NEAR(found[0].communication_seconds, 0.003, 1e-6);
  EXPECT_NEAR(found[0].waited_seconds.at(0), 0.040, 1e-6);
  EXPECT_NEAR(found[0].waited_seconds.at(1), 0.005, 1e-6);
  EXPECT_THAT(straggler_table(found), AllOf(HasSubstr("rank 1"), HasSubstr("0: 40.00 | 1: 5.00")));
}

TEST(Straggling, LeavesOutWhatDoesNotMeet) {
  const CommsRecord sent = record_of(CollectiveKind::kSend, "send", {0.1});
  const CommsRecord mine = record_of(CollectiveKind::kAllToAll, "all_to_all", {0.1}, 8);
  const CommsRecord yours = record_of(CollectiveKind::kAllToAll, "all_to_all", {0.1}, 16);
  CommsRecord one_more = record_of(CollectiveKind::kBroadcast, "broadcast", {0.1, 0.1});
  const CommsRecord one_less = record_of(CollectiveKind::kBroadcast, "broadcast", {0.1});
  CommsRecord not_ended = record_of(CollectiveKind::kReduce, "reduce", {});
  not_ended.launch();
  EXPECT_THAT(compare_ranks({{sent, mine, one_more, not_ended}, {sent, yours, one_less, not_ended}}), IsEmpty());
}

TEST(Straggling, OfOneGroupIsNotThatOfAnother) {
  const auto of = [](std::vector<int> ranks, double seconds) {
    CommsRecord record = record_of(CollectiveKind::kAllReduce, "all_reduce", {seconds});
    record.ranks = std::move(ranks);
    return std::vector<CommsRecord>{record};
  };
  const auto found = compare_ranks({of({0, 1}, 0.3), of({0, 1}, 0.1), of({2, 3}, 0.1), of({2, 3}, 0.9)});
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_NEAR(found[0].waited_seconds.at(0), 0.2, 1e-6);
  EXPECT_NEAR(found[1].waited_seconds.at(1), 0.8, 1e-6);
}

TEST(SummaryTable, HasALineForEachRecord) {
  const std::string text = summary_table({record_of(CollectiveKind::kAllReduce, "all_reduce", {0.01, 0.01}),
                                          record_of(CollectiveKind::kBarrier, "barrier", {0.5}, 0)});
  EXPECT_THAT(text, HasSubstr("Comm. Op            Group (ranks)       Message Size        Count               Total "
                              "Latency(ms)   Avg Latency(ms)     tput_avg (Gbps)     busbw_avg (Gbps)"));
  EXPECT_THAT(text, HasSubstr("all_reduce          world (2)           1.00 MiB            2                   20.00"
                              "               10.00               1.68                0.84"));
  EXPECT_THAT(text,
              HasSubstr("barrier             world (2)           0 B                 1                   500.00"));
}

TEST(SummaryTable, SaysSizesInUnitsOf1024) {
  EXPECT_EQ(size_text(0), "0 B");
  EXPECT_EQ(size_text(1023), "1023 B");
  EXPECT_EQ(size_text(1536), "1.50 KiB");
  EXPECT_EQ(size_text(int64_t{5} << 30), "5.00 GiB");
  EXPECT_EQ(size_text(kOtherSizes), "other sizes");
}

TEST(StragglerTable, NamesThoseOfManyRanksThatWaitedLongest) {
  Straggling one{.operation = "all_reduce", .group = "world", .bytes = 8, .count = 1};
  for (int rank = 0; rank < 20; ++rank) {
    one.ranks.push_back(rank);
    one.waited_seconds.push_back(0.001 * rank);
  }
  EXPECT_THAT(straggler_table({one}), AllOf(HasSubstr("19: 19.00 | 18: 18.00"), HasSubstr("12: 12.00 | others less"),
                                            Not(HasSubstr("11: 11.00"))));
}

}  // namespace
}  // namespace ds::profiling
