#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/support/count_of.h"

namespace ds {
namespace {

using test::count_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Ran {
  std::string out;
  int code = -1;
};

Ran run(const std::string& what, const std::string& environment = "") {
  Ran result;
  const std::string command = environment + " " + std::string(DS_SPAWNED_PROGRAM) + " " + what + " 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  char bytes[4096];
  for (size_t count; (count = fread(bytes, 1, sizeof(bytes), pipe)) > 0;) result.out.append(bytes, count);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

TEST(Spawn, RanksMeetAndTheProgramGoesOnOnce) {
  const Ran ran = run("sum");
  EXPECT_EQ(ran.code, 0) << ran.out;
  for (const char* line : {"rank 0 of 3: 6 over shm", "rank 1 of 3: 6 over shm", "rank 2 of 3: 6 over shm"})
    EXPECT_THAT(ran.out, HasSubstr(line));
  EXPECT_EQ(count_of(ran.out, "the end"), 1U) << ran.out;
}

TEST(Spawn, LibTorchsDebugLevelIsRead) {
  EXPECT_EQ(count_of(run("sum").out, "communication: shm"), 1U);
  EXPECT_EQ(count_of(run("sum", "TORCH_DISTRIBUTED_DEBUG=INFO").out, "communication: shm"), 3U);
  EXPECT_EQ(count_of(run("sum", "TORCH_DISTRIBUTED_DEBUG=DETAIL").out, "communication: shm"), 3U);
  EXPECT_THAT(run("sum", "TORCH_DISTRIBUTED_DEBUG=LOUD").out, HasSubstr("expected OFF, INFO or DETAIL"));
}

TEST(Spawn, WithoutAJobThereIsNoBackend) {
  EXPECT_THAT(run("backend").out, HasSubstr("get_backend: expected a job that was joined"));
}

TEST(Spawn, TheLaunchersRanksAreKnownBeforeTheyMeet) {
  EXPECT_THAT(run("launched").out, HasSubstr("1 ranks\n"));
  EXPECT_THAT(run("launched", "RANK=2 WORLD_SIZE=5 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500").out,
              HasSubstr("5 ranks\n"));
  const std::string jsrun =
      "LSB_JOBID=7 JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=6 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6 ";
  EXPECT_THAT(run("launched", jsrun).out, HasSubstr("6 ranks\n"));
  EXPECT_THAT(run("launched", jsrun + "WORLD_SIZE=4").out, HasSubstr("error: environment: WORLD_SIZE=4, but "));
}

TEST(Spawn, EachCallHasProcessesOfItsOwn) {
  const Ran ran = run("twice");
  EXPECT_EQ(ran.code, 0) << ran.out;
  for (const char* line : {"first 0", "first 1", "second 0", "second 1", "the end"}) {
    EXPECT_EQ(count_of(ran.out, line), 1U) << line << " in " << ran.out;
  }
}

TEST(Spawn, WhatARankThrowsIsTold) {
  const auto begin = std::chrono::steady_clock::now();
  const Ran ran = run("fail");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.out, AllOf(HasSubstr("spawn: rank 1"), HasSubstr("exit code 1: no luck"), Not(HasSubstr("the end"))));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40));
}

TEST(Spawn, ASignalIsNamed) {
  const Ran ran = run("killed");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.out, AllOf(HasSubstr("spawn: rank 0"), HasSubstr("killed by signal 9")));
}

TEST(Spawn, TheCauseIsToldNotWhatFollowedFromIt) {
  EXPECT_THAT(run("together").out, AllOf(HasSubstr("spawn: rank 1"), HasSubstr("killed by signal 9")));
}

TEST(Spawn, AfterAFailureNoProcessIsLeft) {
  for (const char* how : {"fail", "killed", "stay"}) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(run(how).out, AllOf(HasSubstr("error: spawn: rank"), HasSubstr("no process is left"))) << how;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40)) << how;
  }
}

TEST(Spawn, WhereSigchldIsIgnoredStatusesAreKept) {
  const std::string ignored = "env --ignore-signal=CHLD";
  const Ran well = run("well", ignored);
  EXPECT_EQ(well.code, 0) << well.out;
  EXPECT_EQ(count_of(well.out, "SIGCHLD is ignored"), 1U) << "as before the call: " << well.out;
  EXPECT_THAT(run("fail", ignored).out, HasSubstr("exit code 1: no luck"));
}

TEST(Spawn, AStatusThatSomebodyElseTookIsAFailure) {
  const Ran ran = run("reaped");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.out, AllOf(HasSubstr("spawn: rank 1"), HasSubstr("no luck"), Not(HasSubstr("the end"))));
}

TEST(Spawn, MisuseIsNamed) {
  EXPECT_THAT(run("nested").out, HasSubstr("found one inside of a function that spawn() runs"));
  EXPECT_THAT(run("lost").out, HasSubstr("ended without having come to call 1 of spawn()"));
  EXPECT_THAT(run("none").out, HasSubstr("expected at least one process, found 0"));
}

}  // namespace
}  // namespace ds
