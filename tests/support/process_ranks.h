// Tests whose ranks are processes.
//
//   DS_PROCESS_TEST(GlooKill, SurvivorsFail, 3) { ... comm::Rendezvous meeting = ranks.meet(); ... }
//
// The body runs once in each of `world` processes (the test binary, executed again with this test as its filter), which
// meet in a file. A rank passes when its body fails no expectation and throws nothing. The parent passes when all ranks
// passed within the time limit; else it prints the output of every rank in one block each and says of each rank that it
// passed, failed, was killed (as the body may do on purpose: see expect_killed) or hung. A rank that cannot be started
// is a failure.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>

#include "comm/meeting/rendezvous.h"

namespace ds::testing {

// The facts that a body knows of itself.
class ProcessRank {
 public:
  ProcessRank(int rank, int world_size, std::string folder)
      : rank_(rank), world_size_(world_size), folder_(std::move(folder)) {}

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // A folder of this test run's own, shared by its ranks, removed afterwards.
  const std::string& folder() const { return folder_; }

  // Meets the other ranks in a file of that folder; once per body.
  comm::Rendezvous meet(std::chrono::milliseconds timeout = std::chrono::seconds(30)) const;

  // Ends this process as `kill -9` does. Its rank must be among ProcessTest::killed.
  [[noreturn]] static void kill_self();

 private:
  int rank_;
  int world_size_;
  std::string folder_;
};

struct ProcessTest {
  int world_size = 2;
  std::chrono::milliseconds time_limit = std::chrono::seconds(60);
  std::set<int> killed;  // ranks that end by kill_self()
};

// In the parent: starts the ranks and waits for them. In a rank: runs the body. Called from inside a TEST.
void run_process_test(const ProcessTest& test, void (*body)(const ProcessRank&));

}  // namespace ds::testing

#define DS_PROCESS_TEST(suite, name, ...)                                                               \
  static void DsProcessBody_##suite##_##name(const ::ds::testing::ProcessRank&);                        \
  TEST(suite, name) { ::ds::testing::run_process_test({__VA_ARGS__}, DsProcessBody_##suite##_##name); } \
  static void DsProcessBody_##suite##_##name([[maybe_unused]] const ::ds::testing::ProcessRank& ranks)
