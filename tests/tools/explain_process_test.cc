// ds-tool explain as people run it, on records that ranks left.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/flight/flight_folder.h"
#include "comm/flight/flight_log.h"
#include "tests/support/scratch_folder.h"
#include "tools/report/child_process.h"

namespace ds::tool {
namespace {

using comm::FlightLog;
using comm::FlightState;
using report::run_child;

constexpr int64_t kSecond = 1000000000;

// A rank of two that has issued so many collectives of all ranks, and waits in the last.
FlightLog waiting_rank(int rank, uint64_t collectives, int64_t process = 1) {
  FlightLog log;
  comm::set_magic(log.header);
  log.header.entries = 16;
  log.header.rank = rank;
  log.header.world_size = 2;
  log.header.process = process;
  log.header.now_ns = static_cast<int64_t>(collectives) * kSecond;
  log.header.next_sequence = collectives + 1;
  log.header.host.assign("elsewhere");
  comm::FlightGroup group{};
  group.name.assign("world");
  group.ranks.assign("0,1");
  group.own = rank;
  group.position = collectives;
  log.groups.push_back(group);
  comm::FlightEntry entry{};
  entry.sequence = collectives;
  entry.position = collectives;
  entry.issued_ns = entry.waited_ns = log.header.now_ns;
  entry.peer = -1;
  entry.state = FlightState::kWaiting;
  entry.operation.assign("all_reduce");
  log.entries.push_back(entry);
  return log;
}

FlightLog late_rank(int rank, uint64_t collectives) {
  FlightLog log = waiting_rank(rank, collectives);
  log.entries[0].state = FlightState::kFinished;
  log.entries[0].ended_ns = log.header.now_ns;
  return log;
}

class Explain : public ::testing::Test {
 protected:
  void write(const std::string& folder, const FlightLog& log) const {
    scratch_.write(std::filesystem::path(comm::flight_file(folder, log.header.rank)), comm::to_bytes(log));
  }
  std::string folder(const std::string& given) const { return scratch_ / given; }
  // Whose folder, relative to that of all jobs, is explained.
  std::string explained(const std::string& given) const {
    const auto run = run_child({DS_TOOL, "explain", "--json", scratch_ / given}, std::chrono::seconds(100));
    EXPECT_TRUE(run.fine) << run.ending << "\n" << run.err;
    if (!run.fine) return "";
    const std::string folder = nlohmann::json::parse(run.out).at("folder");
    return std::filesystem::path(folder).lexically_relative(scratch_.path());
  }
  // Rank 1 was late for the 8th.
  void write_stall() const {
    write("job/stall1", waiting_rank(0, 8));
    write("job/stall1", late_rank(1, 7));
  }

 private:
  const test::ScratchFolder scratch_;
};

TEST_F(Explain, TakesTheLastStallWhileItLasts) {
  write_stall();
  write("job", waiting_rank(0, 8));
  write("job", late_rank(1, 7));
  EXPECT_EQ(explained("job"), "job/stall1");
}

TEST_F(Explain, AStallThatIsOverIsNotTheNews) {
  write_stall();
  write("job", waiting_rank(0, 90));
  write("job", waiting_rank(1, 90));
  EXPECT_EQ(explained("job"), "job");
  EXPECT_EQ(explained("job/stall1"), "job/stall1");
}

TEST_F(Explain, OfAJobThatEndedInGoodOrderTheStallIsLeft) {
  write_stall();
  EXPECT_EQ(explained("job"), "job/stall1");
  for (const int rank : {0, 1}) {
    FlightLog log = late_rank(rank, 90);
    log.header.left = 1;
    write("job", log);
  }
  EXPECT_EQ(explained("job"), "job/stall1");
}

// Which ended the job: what a rank issued before it heard of it explains nothing.
TEST_F(Explain, AHopelessStallIsTheLast) {
  write("job/stall1", waiting_rank(0, 8));
  FlightLog dead = late_rank(1, 7);
  dead.silent_seconds = 100;
  write("job/stall1", dead);
  write("job", waiting_rank(0, 9));
  write("job", late_rank(1, 7));
  EXPECT_EQ(explained("job"), "job/stall1");
  write("job", waiting_rank(0, 3, 2));  // another start
  EXPECT_EQ(explained("job"), "job");
}

// A rank of 2 x 2 x 2, which waits in the first collective of its tensor axis; or, late for it, has ended one of its
// data axis.
FlightLog rank_of_three_axes(int rank, bool late) {
  FlightLog log = waiting_rank(rank, 1);
  log.header.world_size = 8;
  log.groups.clear();
  const auto add = [&](const char* name, int own, int first, int stride, bool entered) {
    comm::FlightGroup group{};
    group.name.assign(name);
    group.ranks.assign(std::to_string(first) + "," + std::to_string(first + stride));
    group.own = own;
    group.position = entered ? 1 : 0;
    log.groups.push_back(group);
  };
  add("tensor", rank % 2, rank - rank % 2, 1, !late);
  add("data+expert", rank / 2 % 2, rank - rank / 2 % 2 * 2, 2, late);
  add("pipe", rank / 4, rank % 4, 4, false);
  if (!late) return log;
  log.entries[0].group = 1;
  log.entries[0].state = FlightState::kFinished;
  log.entries[0].ended_ns = log.header.now_ns;
  return log;
}

TEST_F(Explain, SaysWhereTheGuiltyRankIsOnTheAxesOfTheMesh) {
  for (int rank = 0; rank < 8; ++rank) write("job", rank_of_three_axes(rank, rank == 5));
  const auto run = run_child({DS_TOOL, "explain", folder("job")}, std::chrono::seconds(100));
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  EXPECT_THAT(run.out, ::testing::HasSubstr("rank 5 (elsewhere, pid 1; pipe 1, data 0, tensor 1) has not entered it"));
}

}  // namespace
}  // namespace ds::tool
