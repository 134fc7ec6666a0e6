// What the library does to its process, and that each switch of docs/process.md turns it off.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "comm/backends/factory.h"
#include "comm/flight/flight_watch.h"
#include "core/check.h"
#include "core/memory/host_memory.h"
#include "core/split/split_tensor.h"
#include "dsengine/engine.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Whether a block of 24 MiB has pages of its own, as glibc gives it them unless it is told otherwise.
bool has_own_pages() {
  const size_t before = mallinfo2().hblks;
  void* const block = std::malloc(size_t{24} << 20);
  const bool own = mallinfo2().hblks > before;
  std::free(block);
  return own;
}

DS_PROCESS_TEST(ProcessEffects, MallocIsTold, 1) {
  keep_freed_host_memory();
  EXPECT_FALSE(has_own_pages());
}

DS_PROCESS_TEST(ProcessEffects, MallocIsLeftAlone, 1) {
  ASSERT_EQ(setenv("DS_MALLOC_THRESHOLDS", "0", 1), 0);
  keep_freed_host_memory();
  EXPECT_TRUE(has_own_pages());
}

int taken_signals() {
  int taken = 0;
  for (int number = SIGRTMIN; number <= SIGRTMAX; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL) ++taken;
  }
  return taken;
}

// Ranks that meet as under ds-launch, with the watch. `file` lives as long: rank 0's process has the store.
struct Job {
  explicit Job(const ds::testing::ProcessRank& ranks, const std::string& flight_recorder,
               const std::shared_ptr<torch::nn::Module>& model = torch::nn::Linear(2, 1).ptr())
      : file(ranks.meet()) {
    test::set_launcher_environment(file);
    const auto config = nlohmann::json::parse(
        cat(R"({"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true, )",
            R"("optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "flight_recorder": )", flight_recorder, "}"));
    engine = initialize({.model = model, .config = config}).engine;
  }
  comm::Rendezvous file;
  std::shared_ptr<Engine> engine;
};

DS_PROCESS_TEST(ProcessEffects, ASignalIsTaken, 2) {
  const Job job(ranks, R"({"folder": ")" + ranks.folder() + R"(/flight"})");
  EXPECT_EQ(taken_signals(), 1);
}

DS_PROCESS_TEST(ProcessEffects, NoSignalIsTaken, 2) {
  const Job job(ranks, R"({"stacks": false, "folder": ")" + ranks.folder() + R"(/flight"})");
  EXPECT_EQ(taken_signals(), 0);
}

bool has_default(int number) {
  struct sigaction action {};
  return sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_DFL;
}

// A rank that loses another one, or that meets the limit of a file, gets an error.
DS_PROCESS_TEST(ProcessEffects, WritesThatFailAreErrors, 2) {
  const Job job(ranks, R"({"enabled": false})");
  EXPECT_EQ(raise(SIGPIPE), 0);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{64, before.rlim_max};
  if (ranks.rank() == 0) ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string why;
  try {
    job.engine->save_checkpoint(ranks.folder() + "/checkpoints");
  } catch (const IoError& error) {
    why = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(why, AllOf(HasSubstr(ranks.rank() == 0 ? "/checkpoints" : "rank 0"),
                         HasSubstr(ranks.rank() == 0 ? "ulimit -f" : "")));
}

DS_PROCESS_TEST(ProcessEffects, SignalsOfWritesAreLeftAlone, 2) {
  ASSERT_EQ(setenv("DS_WRITE_SIGNALS", "0", 1), 0);
  const Job job(ranks, R"({"enabled": false})");
  EXPECT_TRUE(has_default(SIGPIPE));
  EXPECT_TRUE(has_default(SIGXFSZ));
}

// Ends, in a forked child, all that the parent has, with its output in `said`. Returns the exit code; -1: it hung.
int end_in_a_child(std::optional<Job>& job, std::optional<comm::Work>& work, const std::string& said) {
  const pid_t child = fork();
  if (child == 0) {
    const int file = open(said.c_str(), O_WRONLY | O_CREAT, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    work.reset();
    job.reset();
    _exit(0);
  }
  int status = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

// A worker that is forked and ends: stages 1 and 2 publish parameters then, and all have threads, groups and a record.
void end_in_children(const ds::testing::ProcessRank& ranks, const std::string& backend, int stage) {
  const std::string flight = ranks.folder() + "/flight";
  torch::nn::Linear model(2, 1);
  std::optional<Job> job;
  job.emplace(ranks,
              R"({"folder": ")" + flight + R"("}, "communication_backend": ")" + backend +
                  R"(", "zero_optimization": {"stage": )" + cat(stage) + "}",
              model.ptr());
  const auto train = [&] {
    job->engine->backward(model->forward(at::ones({1, 2})).sum());
    job->engine->step();
  };
  train();
  std::optional<comm::Work> work = job->engine->world().all_reduce(at::ones({4}), comm::ReduceOp::kSum, "mine");
  const std::string said = cat(ranks.folder(), "/said", ranks.rank());
  EXPECT_EQ(end_in_a_child(job, work, said), 0);
  EXPECT_EQ(std::filesystem::file_size(said), 0U);
  work->wait();
  train();
  const std::filesystem::recursive_directory_iterator files(flight);
  EXPECT_EQ(std::count_if(begin(files), end(files), [](const auto& file) { return file.is_regular_file(); }), 2);
  job->engine->world().barrier();
}

DS_PROCESS_TEST(ForkedChild, EndsAndLeavesTheParentsAlone, 2) { end_in_children(ranks, "shm", 2); }
DS_PROCESS_TEST(ForkedChild, EndsAtStage3, 2) { end_in_children(ranks, "shm", 3); }
DS_PROCESS_TEST(ForkedChild, EndsOverGloo, 2) { end_in_children(ranks, "gloo", 1); }

// Nothing that the parent's ranks would hear of.
DS_PROCESS_TEST(ForkedChild, IsRefusedWhereItWouldExchange, 2) {
  const Job job(ranks, R"({"folder": ")" + ranks.folder() + R"(/flight"})");
  const pid_t child = fork();
  if (child == 0) {
    try {
      job.engine->world().barrier();
    } catch (const UsageError& error) {
      _exit(std::string(error.what()).find("was forked") == std::string::npos ? 2 : 0);
    }
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  job.engine->world().barrier();
}

// Operators pay for split tensors where there are some: from the first axis of more than one rank on.
DS_PROCESS_TEST(ProcessEffects, NoKeyOfSplitTensorsWithoutAnAxis, 2) {
  const comm::Rendezvous meeting = ranks.meet();
  test::set_launcher_environment(meeting);
  const auto registered = [] { return c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kSplitKey); };
  const auto train = [&](int tensor) {
    torch::nn::Linear model(2, 2);
    const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1},
                                   {"zero_optimization", {{"stage", 3}}},
                                   {"tensor_parallel", {{"autotp_size", tensor}}},
                                   {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.1}}}}}};
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .split = {{"", parallel::Style::kColumn}}}).engine;
    engine->backward(model->forward(at::ones({1, 2})).sum());
    engine->step();
  };
  train(1);
  EXPECT_FALSE(registered());
  train(2);
  EXPECT_TRUE(registered());
}

// The ranks issue different collectives, so both are told to end; rank 1 does not hear of it in time.
DS_PROCESS_TEST(ProcessEffects, ARankThatHangsIsLeftAsItIs, 2) {
  const Job job(ranks, R"({"end_process": false, "stall_limit": 1, "folder": ")" + ranks.folder() + R"(/flight"})");
  comm::Communicator& world = job.engine->world();
  const auto reduce = [&] {
    world.all_reduce(at::ones({2}), comm::ReduceOp::kSum, cat("of rank ", ranks.rank())).wait();
  };
  EXPECT_THROW(reduce(), Error);
  std::this_thread::sleep_for(comm::FlightWatch::kGrace + std::chrono::seconds(4));
  EXPECT_THAT(reduce, ThrowsMessage<CommError>(HasSubstr("of rank")));
}

TEST(ProcessEffects, SeedsAreLeftAloneWhereTheProgramSaysSo) {
  const auto config = nlohmann::json::parse(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})");
  const auto draw = [&](bool seed_generators) {
    const torch::nn::Linear model(2, 1);
    torch::manual_seed(7);
    const auto run = initialize({.model = model.ptr(), .config = config, .seed_generators = seed_generators});
    return torch::rand({4});
  };
  torch::manual_seed(7);
  const at::Tensor of_the_program = torch::rand({4});
  EXPECT_TRUE(torch::equal(draw(false), of_the_program));
  EXPECT_FALSE(torch::equal(draw(true), of_the_program));
}

}  // namespace
}  // namespace ds::engine
