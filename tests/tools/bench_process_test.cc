// ds-tool bench under ds-launch.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tools/report/child_process.h"

namespace ds::tool {
namespace {

using report::Finished;
using report::run_child;
using ::testing::HasSubstr;

// One that nothing listens on, so that jobs beside this test do not meet it.
std::string free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool found = ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(socket);
  return found ? std::to_string(ntohs(address.sin_port)) : "";
}

Finished bench(const std::vector<std::string>& words) {
  std::vector<std::string> command = {DS_LAUNCH,       "--quiet",   "--num_procs", "2",
                                      "--master_port", free_port(), DS_TOOL,       "bench"};
  command.insert(command.end(), words.begin(), words.end());
  return run_child(command, std::chrono::seconds(100));
}

class BenchBackends : public ::testing::TestWithParam<const char*> {};

TEST_P(BenchBackends, MeasureEveryOperationAndFindNothingWrong) {
  const Finished run = bench({"--backend", GetParam(), "--min", "1K", "--max", "64K", "--factor", "8", "--iterations",
                              "3", "--warmup", "1", "--check", "--json"});
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  const auto json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["ranks"].size(), 2U);
  EXPECT_EQ(json["backend"].get<std::string>().find(GetParam()), 0U);
  EXPECT_EQ(json["wrong"], 0);
  std::set<std::string> operations;
  for (const auto& result : json["results"]) {
    operations.insert(result["operation"]);
    EXPECT_GT(result["time_us"].get<double>(), 0);
    if (result["operation"] == "barrier") continue;
    EXPECT_EQ(result["wrong"], 0);
    EXPECT_GT(result["algbw"].get<double>(), 0);
  }
  EXPECT_EQ(operations.size(), 8U);
}

INSTANTIATE_TEST_SUITE_P(OnCpu, BenchBackends, ::testing::Values("shm", "gloo"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Bench, PrintsATableOnRankZeroAlone) {
  const Finished run = bench({"all_reduce", "--max", "4K", "--iterations", "2", "--warmup", "0"});
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  EXPECT_THAT(run.out, HasSubstr("# all_reduce"));
  EXPECT_THAT(run.out, HasSubstr("# Wrong elements: 0 OK"));
  EXPECT_EQ(run.out.find("[rank 1]"), std::string::npos);
}

TEST(Bench, RunsAlone) {
  const Finished run =
      run_child({DS_TOOL, "bench", "--max", "4K", "--iterations", "2", "--json"}, std::chrono::seconds(100));
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  EXPECT_EQ(nlohmann::json::parse(run.out)["ranks"].size(), 1U);
}

TEST(Bench, RefusesWhatItCannotDo) {
  struct Case {
    std::vector<std::string> words;
    const char* says;
  };
  for (const Case& wrong :
       std::vector<Case>{{{"allreduce"}, "or all, found \"allreduce\""},
                         {{"--min", "1X"}, "--min: expected bytes"},
                         {{"--dtype", "float8"}, "--dtype: expected one of float32"},
                         {{"--backend", "nccl", "--device", "cpu"}, "nccl carries CUDA tensors only"},
                         {{"--root", "2"}, "--root: expected a rank below 2"}}) {
    const Finished run = bench(wrong.words);
    EXPECT_EQ(run.ending, "exit code 2") << wrong.words[0];
    EXPECT_THAT(run.err, HasSubstr(wrong.says));
  }
}

}  // namespace
}  // namespace ds::tool
