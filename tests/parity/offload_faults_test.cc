// Offload when disk, memory or a rank fails: an error that says what to change, or training that goes on; files that
// vanish; nothing damaged of what was saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <thread>

#include "tests/parity/gpt_job.h"
#include "tests/support/file_text.h"
#include "tests/support/small_disk.h"

namespace ds::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";
constexpr const char* kParameterPath = "zero_optimization.offload_param.nvme_path";

nlohmann::json optimizer_in(const fs::path& folder) {
  nlohmann::json config = reference_config(2, 1, 1);
  config["zero_optimization"]["offload_optimizer"] = {{"device", "nvme"}, {"nvme_path", folder.string()}};
  return config;
}

nlohmann::json all_in(const fs::path& folder) {
  nlohmann::json config = reference_config(3, 1, 1);
  config["zero_optimization"]["offload_optimizer"] = {{"device", "nvme"}, {"nvme_path", folder.string()}};
  config["zero_optimization"]["offload_param"] = {
      {"device", "nvme"}, {"nvme_path", folder.string()}, {"max_in_cpu", 0}};
  return config;
}

// The job must end by itself, with a message and not with an abort.
std::string error_of(GptJob job) {
  const auto begin = std::chrono::steady_clock::now();
  const GptResult run = try_gpt(job);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60)) << "a failure must not hang";
  EXPECT_NE(run.exit_code, 0) << run.output;
  EXPECT_THAT(run.output, AllOf(Not(HasSubstr("terminate called")), Not(HasSubstr("killed by SIG"))));
  return run.output;
}

// Files that the process has open below the folder, with or without a name.
int open_files(pid_t process, const fs::path& folder) {
  int count = 0;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(process) + "/fd", none)) {
    count += fs::read_symlink(entry.path(), none).string().starts_with(folder.string() + "/") ? 1 : 0;
  }
  return count;
}

int64_t written_bytes(pid_t process) {
  std::ifstream in("/proc/" + std::to_string(process) + "/io");
  for (std::string name, value; in >> name >> value;) {
    if (name == "write_bytes:") return std::stoll(value);
  }
  return 0;
}

TEST(OffloadFaults, AFolderThatDoesNotExist) {
  EXPECT_THAT(error_of({.config = optimizer_in("/no/such/folder"), .ranks = 2, .steps = 1}),
              AllOf(HasSubstr(kOptimizerPath), HasSubstr("/no/such/folder"), HasSubstr("make the folder")));
  nlohmann::json config = all_in("/no/such/folder");
  config["zero_optimization"].erase("offload_optimizer");
  EXPECT_THAT(error_of({.config = config, .ranks = 2, .steps = 1}),
              AllOf(HasSubstr(kParameterPath), HasSubstr("/no/such/folder")));
}

TEST(OffloadFaults, AFileInPlaceOfAFolder) {
  const DiskFolder folder;
  const fs::path file = folder.path() / "file";
  std::ofstream(file) << "content";
  EXPECT_THAT(error_of({.config = optimizer_in(file), .ranks = 2, .steps = 1}),
              AllOf(HasSubstr(kOptimizerPath), HasSubstr("expected a folder"), HasSubstr(file.string())));
  EXPECT_EQ(test::file_text(file), "content");
}

TEST(OffloadFaults, AFolderInMemory) {
  EXPECT_THAT(error_of({.config = optimizer_in("/dev/shm"), .ranks = 2, .steps = 1}),
              AllOf(HasSubstr(kOptimizerPath), HasSubstr("tmpfs"), HasSubstr("/dev/shm"), HasSubstr("\"cpu\"")));
}

TEST(OffloadFaults, AFileThatMayNotGrowSoFar) {
  const DiskFolder folder;
  EXPECT_THAT(error_of({.config = optimizer_in(folder.path()), .ranks = 1, .steps = 1, .limits = "ulimit -f 5000"}),
              AllOf(HasSubstr(kOptimizerPath), HasSubstr(folder.path().string()), HasSubstr("ulimit -f")));
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(OffloadFaults, AFullDisk) {
  const SmallDisk disk(32, build_disk());
  const fs::path folder = disk.path();
  if (!disk.mounted()) {
    GTEST_SKIP() << "this user may not mount file systems; AFileThatMayNotGrowSoFar has the limit that it may set";
  }
  const GptJob job = {.config = optimizer_in(folder), .ranks = 2, .steps = 10};
  const std::vector<double> losses = losses_of(run_gpt(job));
  // What the files need is theirs from the start: others may fill the rest.
  GptJob filled = job;
  filled.during = [&](const fs::path&) { disk.fill(); };
  EXPECT_EQ(losses_of(run_gpt(filled)), losses);
  EXPECT_GT(fs::file_size(folder / "filler"), 1 << 20);
  disk.fill();
  EXPECT_THAT(error_of(job), AllOf(HasSubstr(kOptimizerPath), HasSubstr("too little space"), HasSubstr("needed"),
                                   HasSubstr("free"), HasSubstr(disk.path())));
  fs::remove(folder / "filler");
  EXPECT_EQ(losses_of(run_gpt(job)), losses);
}

// Two ranks of which each has its states in a file, and rank 1 is killed while it writes to it.
TEST(OffloadFaults, ARankKilledInTheMiddleOfAStep) {
  const DiskFolder folder;
  const fs::path weights = folder.path() / "weights.safetensors";
  const fs::path files = folder.path() / "files";
  fs::create_directory(files);
  for (const nlohmann::json& config : {optimizer_in(files), all_in(files)}) {
    const GptJob job = {.config = config, .ranks = 2, .steps = 8, .arguments = {"--save", weights.string()}};
    const std::vector<double> losses = losses_of(run_gpt(job));
    const std::string saved = test::file_text(weights);
    GptJob killed = job;
    killed.steps = 1000000;
    killed.during = [&](const fs::path& metrics) {
      const pid_t process = process_of_rank(metrics, 1);
      ASSERT_GT(process, 0);
      EXPECT_GT(open_files(process, files), 0);
      EXPECT_TRUE(fs::is_empty(files));  // they have no names
      const int64_t before = written_bytes(process);
      for (int turn = 0; turn < 100000 && written_bytes(process) == before; ++turn) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      EXPECT_GT(written_bytes(process), before);
      kill(process, SIGKILL);
    };
    const GptResult run = try_gpt(killed);
    EXPECT_EQ(run.exit_code, 128 + SIGKILL) << run.output;
    EXPECT_THAT(run.output, AllOf(HasSubstr("rank 1"), HasSubstr("SIGKILL")));
    EXPECT_TRUE(fs::is_empty(files));
    EXPECT_TRUE(test::file_text(weights) == saved);
    EXPECT_EQ(losses_of(run_gpt(job)), losses);
    EXPECT_TRUE(test::file_text(weights) == saved);
  }
}

TEST(OffloadFaults, TooLittleHostMemory) {
  nlohmann::json config = reference_config(2, 1, 1);
  config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
  // 12.6 million parameters: 50 MB for the model, 100 MB for half of the gradients, masters and states.
  GptJob job = {.config = config, .ranks = 2, .steps = 1, .arguments = {"--hidden", "512"}};
  job.limits = "ulimit -d 200000";
  EXPECT_THAT(error_of(job),
              AllOf(HasSubstr("zero_optimization.offload_optimizer"), HasSubstr("MiB"), HasSubstr("available are"),
                    HasSubstr("RLIMIT_DATA"), HasSubstr("offload_optimizer.ratio"), HasSubstr("nvme")));
  job.limits = "ulimit -d 2000000";
  EXPECT_EQ(run_gpt(job).steps.size(), 1U);
}

}  // namespace
}  // namespace ds::test
