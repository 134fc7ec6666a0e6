#include "tests/support/process_ranks.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/text.h"
#include "tests/support/scratch_folder.h"

extern char** environ;  // NOLINT

namespace ds::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRankVariable = "DS_TEST_PROCESS_RANK";
constexpr const char* kFolderVariable = "DS_TEST_PROCESS_FOLDER";

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

enum class Fate { kRunning, kPassed, kFailed, kKilled, kHung };

struct RankProcess {
  int rank = 0;
  pid_t process = 0;
  Fate fate = Fate::kRunning;
  std::string how;
  std::string log;
};

std::string own_filter() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return cat("--gtest_filter=", info->test_suite_name(), ".", info->name());
}

RankProcess start(int rank, const std::string& folder) {
  RankProcess started{.rank = rank, .log = cat(folder, "/rank", rank, ".log")};
  std::vector<std::string> environment{cat(kRankVariable, "=", rank), cat(kFolderVariable, "=", folder),
                                       "OMP_NUM_THREADS=1"};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!text.starts_with("OMP_NUM_THREADS=") && !text.starts_with("GTEST_")) environment.push_back(text);
  }
  std::vector<std::string> arguments{std::filesystem::read_symlink("/proc/self/exe").string(), own_filter(),
                                     "--gtest_color=no", "--gtest_also_run_disabled_tests"};
  std::vector<char*> argv;
  std::vector<char*> envp;
  for (auto& text : arguments) argv.push_back(text.data());
  for (auto& text : environment) envp.push_back(text.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, started.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  const int error = ::posix_spawn(&started.process, argv[0], &files, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    started.fate = Fate::kFailed;
    started.how = cat("could not be started: ", std::strerror(error));
  }
  return started;
}

// Takes note of a process that has ended.
void reap(RankProcess& rank) {
  int status = 0;
  if (::waitpid(rank.process, &status, WNOHANG) != rank.process) return;
  if (WIFSIGNALED(status)) {
    rank.fate = WTERMSIG(status) == SIGKILL ? Fate::kKilled : Fate::kFailed;
    rank.how = cat("was ended by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  } else {
    rank.fate = WEXITSTATUS(status) == 0 ? Fate::kPassed : Fate::kFailed;
    rank.how = rank.fate == Fate::kPassed ? "passed" : cat("failed (exit code ", WEXITSTATUS(status), ")");
  }
}

bool await(std::vector<RankProcess>& ranks, Clock::time_point deadline) {
  for (;;) {
    bool running = false;
    for (auto& rank : ranks) {
      if (rank.fate == Fate::kRunning) reap(rank);
      running = running || rank.fate == Fate::kRunning;
    }
    if (!running) return true;
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void end_hung(std::vector<RankProcess>& ranks, std::chrono::milliseconds limit) {
  for (auto& rank : ranks) {
    if (rank.fate != Fate::kRunning) continue;
    ::kill(rank.process, SIGKILL);
    ::waitpid(rank.process, nullptr, 0);
    rank.fate = Fate::kHung;
    rank.how = cat("hung: still running after ", limit.count(), " ms");
  }
}

void report(const ProcessTest& test, const std::vector<RankProcess>& ranks) {
  std::string summary;
  bool good = true;
  for (const auto& rank : ranks) {
    const Fate expected = test.killed.contains(rank.rank) ? Fate::kKilled : Fate::kPassed;
    good = good && rank.fate == expected;
    summary += cat("\n  rank ", rank.rank, " ", rank.how, rank.fate == expected ? "" : "   <--");
  }
  if (good) return;
  for (const auto& rank : ranks) {
    summary += cat("\n---------- output of rank ", rank.rank, " ----------\n", read_file(rank.log));
  }
  ADD_FAILURE() << "ranks as processes:" << summary;
}

}  // namespace

comm::Rendezvous ProcessRank::meet(std::chrono::milliseconds timeout) const {
  return comm::rendezvous({.init_method = cat("file://", folder_, "/meeting?rank=", rank_, "&world_size=", world_size_),
                           .timeout = timeout});
}

void ProcessRank::kill_self() {
  ::kill(::getpid(), SIGKILL);
  ::pause();
  std::abort();
}

void run_process_test(const ProcessTest& test, void (*body)(const ProcessRank&)) {
  if (const char* rank = std::getenv(kRankVariable)) {
    body(ProcessRank(std::atoi(rank), test.world_size, std::getenv(kFolderVariable)));
    return;
  }
  const test::ScratchFolder folder;
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < test.world_size; ++rank) ranks.push_back(start(rank, folder.path().string()));
  if (!await(ranks, Clock::now() + test.time_limit)) end_hung(ranks, test.time_limit);
  report(test, ranks);
}

}  // namespace ds::testing
