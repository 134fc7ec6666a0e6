// Jobs that are killed while they save: what is in the folder of checkpoints is whole, and is what training had at that
// step. DS_CRASH_KILLS sets how many jobs are killed (default 30, of parts of parameters 8).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

extern char** environ;  // NOLINT

namespace ds::engine {
namespace {

namespace fs = std::filesystem;
using test::run_ranks;

constexpr int kJobRanks = 2;
constexpr int64_t kMostSteps = 3000;
constexpr const char* kRank = "DS_CRASH_RANK";
constexpr const char* kMode = "DS_CRASH_MODE";
constexpr const char* kFolder = "DS_CRASH_FOLDER";
constexpr const char* kMeeting = "DS_CRASH_MEETING";

// How a job saves.
struct SaveMode {
  bool asynchronous = false;
  int64_t keep_last = 2;
  bool one_tag = false;
  int stage = 1;
  int tensor = 1;  // ranks that have parts of the parameters
};

constexpr int kModes = 6;        // of whole parameters
constexpr int kTensorModes = 2;  // after those: of parts

// Half of them beside training; keeping two, keeping more, and always under the same name.
SaveMode mode_number(int number) {
  if (number >= kModes) return {.asynchronous = number % 2 == 1, .stage = number % 2 == 1 ? 3 : 0, .tensor = kJobRanks};
  const int kind = number / 2 % 3;
  return {.asynchronous = number % 2 == 1, .keep_last = kind == 1 ? 6 : 2, .one_tag = kind == 2, .stage = kind + 1};
}

// Every step changes the weights.
nlohmann::ordered_json job_config(int stage, int tensor, int ranks = kJobRanks) {
  nlohmann::ordered_json config = carried_config(stage, ranks / tensor);
  config.erase("scheduler");
  if (tensor == 1) return config;
  const auto spec = [](const char* pattern, const char* type) {
    return nlohmann::ordered_json{{"patterns", {pattern}}, {"partition_type", type}};
  };
  config["tensor_parallel"] = {
      {"autotp_size", tensor},
      {"partition_config",
       {{"use_default_specs", false},
        {"layer_specs", {spec(".*(embed|tied)\\.weight$", "column"), spec(".*middle\\.weight$", "row")}}}}};
  return config;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

// --- the job that is killed ------------------------------------------------------------------------------------------

// Goes on from the last checkpoint and saves after every step, until somebody ends it.
void train_until_killed() {
  const int rank = std::stoi(environment(kRank));
  const SaveMode mode = mode_number(std::stoi(environment(kMode)));
  const std::string folder = environment(kFolder);
  const std::string save_dir = folder + "/checkpoints";
  CarriedNet model;
  const auto engine =
      initialize({.model = model.ptr(),
                  .config = job_config(mode.stage, mode.tensor),
                  .init_method = cat("file://", environment(kMeeting), "?rank=", rank, "&world_size=", kJobRanks),
                  .timeout = std::chrono::seconds(20)})
          .engine;
  engine->load_checkpoint(save_dir);
  std::ofstream(cat(environment(kMeeting), ".ready", rank)) << "ready\n";
  std::ofstream reported(cat(folder, "/reported"), std::ios::app);
  while (engine->global_steps() < kMostSteps) {
    train_until(*engine, model, engine->global_steps() + 1);
    engine->save_checkpoint(save_dir, mode.one_tag ? "always" : "",
                            {.asynchronous = mode.asynchronous, .keep_last = mode.keep_last});
    if (rank == 0 && !mode.asynchronous) reported << engine->global_steps() << std::endl;
  }
  engine->wait_for_checkpoint();
  pause();
}

// --- starting and killing it -----------------------------------------------------------------------------------------

class CrashingJob {
 public:
  CrashingJob(const std::string& test, const std::string& folder, int mode, int number)
      : meeting_(cat(folder, "/meeting", number)) {
    for (int rank = 0; rank < kJobRanks; ++rank) start(test, folder, mode, rank);
  }
  ~CrashingJob() {
    for (int rank = 0; rank < kJobRanks; ++rank) end(rank);
  }
  CrashingJob(const CrashingJob&) = delete;
  CrashingJob& operator=(const CrashingJob&) = delete;

  // False: it ended by itself, or did not come so far in time.
  bool await_ready() {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(40);
    for (int rank = 0; rank < kJobRanks; ++rank) {
      while (!fs::exists(cat(meeting_, ".ready", rank))) {
        if (std::chrono::steady_clock::now() > limit || ended(rank)) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return true;
  }
  bool ended(int rank) {
    pid_t& process = processes_.at(static_cast<size_t>(rank));
    if (process != 0 && waitpid(process, nullptr, WNOHANG) == process) process = 0;
    return process == 0;
  }
  void send_kill(int rank) {
    if (!ended(rank)) kill(processes_.at(static_cast<size_t>(rank)), SIGKILL);
  }
  void end(int rank) {
    pid_t& process = processes_.at(static_cast<size_t>(rank));
    if (process == 0) return;
    kill(process, SIGKILL);
    waitpid(process, nullptr, 0);
    process = 0;
  }
  std::string output() const {
    std::string text;
    for (int rank = 0; rank < kJobRanks; ++rank) {
      std::ifstream in(cat(meeting_, ".log", rank));
      text += cat("rank ", rank, ":\n", std::string(std::istreambuf_iterator<char>(in), {}));
    }
    return text;
  }

 private:
  void start(const std::string& test, const std::string& folder, int mode, int rank) {
    std::vector<std::string> variables{cat(kRank, "=", rank), cat(kMode, "=", mode), cat(kFolder, "=", folder),
                                       cat(kMeeting, "=", meeting_), "OMP_NUM_THREADS=1"};
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      if (!text.starts_with("OMP_NUM_THREADS=") && !text.starts_with("GTEST_")) variables.push_back(text);
    }
    std::vector<std::string> words{fs::read_symlink("/proc/self/exe").string(), "--gtest_filter=" + test};
    std::vector<char*> argv;
    std::vector<char*> envp;
    for (std::string& word : words) argv.push_back(word.data());
    for (std::string& variable : variables) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, cat(meeting_, ".log", rank).c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
    pid_t process = 0;
    const int error = posix_spawn(&process, argv[0], &files, nullptr, argv.data(), envp.data());
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) throw std::runtime_error(cat("cannot start a rank: ", error));
    processes_.push_back(process);
  }

  std::string meeting_;
  std::vector<pid_t> processes_;
};

// --- what must be there afterwards -----------------------------------------------------------------------------------

uint64_t checksum_of(const State& weights) {
  uint64_t sum = 0;
  for (const auto& [name, values] : weights) {
    const at::Tensor whole = values.contiguous();
    sum = sum * 1099511628211ULL + checkpoint::checksum(whole.const_data_ptr(), whole.nbytes());
  }
  return sum;
}

// Of the weights after each step of training without a break.
std::vector<uint64_t> uninterrupted(int tensor) {
  std::vector<uint64_t> sums;
  run_ranks(kJobRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), job_config(1, tensor), communicator).engine;
    for (int64_t step = 0; step <= kMostSteps + 1; ++step) {
      const uint64_t sum = checksum_of(train_until(*engine, model, step));
      if (communicator.rank() == 0) sums.push_back(sum);
    }
  });
  return sums;
}

int64_t last_reported(const std::string& folder) {
  std::ifstream in(folder + "/reported");
  int64_t last = 0;
  for (int64_t step = 0; in >> step;) last = step;
  return last;
}

// Loads without a tag, as the next job would; returns the step, 0 for nothing.
int64_t loaded_step(const std::string& save_dir, int stage, int tensor, const std::vector<uint64_t>& sums) {
  int64_t loaded = 0;
  run_ranks(kJobRanks, [&](comm::Communicator& communicator) {
    CarriedNet model;
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(0.125);
    }
    const auto engine = start(model.ptr(), job_config(stage, tensor), communicator).engine;
    if (!engine->load_checkpoint(save_dir)) return;
    const int64_t step = engine->global_steps();
    EXPECT_GT(step, 0);
    const uint64_t found = checksum_of(copy_of(engine->fp32_state_dict()));
    // The states of the optimizer show in the next step.
    const uint64_t next = checksum_of(train_until(*engine, model, step + 1));
    if (communicator.rank() != 0) return;
    EXPECT_EQ(found, sums.at(static_cast<size_t>(step))) << "step " << step;
    EXPECT_EQ(next, sums.at(static_cast<size_t>(step + 1))) << "the step after " << step;
    loaded = step;
  });
  return loaded;
}

// Of parts one rank makes the same whole.
void expect_whole_on_one_rank(const std::string& save_dir, int64_t step, const std::vector<uint64_t>& sums) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), job_config(1, 1, 1), communicator).engine;
    ASSERT_TRUE(engine->load_checkpoint(save_dir));
    EXPECT_EQ(engine->global_steps(), step);
    EXPECT_EQ(checksum_of(copy_of(engine->fp32_state_dict())), sums.at(static_cast<size_t>(step)));
  });
}

struct Found {
  int64_t step = 0;
  int visible = 0;
  int incomplete = 0;
};

Found expect_whole(const std::string& folder, const SaveMode& mode, int stage, const std::vector<uint64_t>& sums,
                   const Found& before) {
  const std::string save_dir = folder + "/checkpoints";
  Found found;
  if (!fs::exists(save_dir)) return found;
  int visible = 0;
  for (const auto& entry : fs::directory_iterator(save_dir)) {
    const std::string name = entry.path().filename();
    found.incomplete += name.starts_with('.') ? 1 : 0;
    if (name.starts_with('.') || name == "latest" || name.ends_with(".tmp")) continue;
    ++visible;
    for (const checkpoint::Damage& damage : checkpoint::verify(entry.path().string())) {
      ADD_FAILURE() << entry.path() << ": " << damage.file << ": " << damage.tensor << ": " << damage.what;
    }
  }
  EXPECT_EQ(checkpoint::whole_tags(save_dir).size(), static_cast<size_t>(visible));
  // A job that ended between publishing and removing leaves one more than it found, or than are kept and named.
  EXPECT_LE(visible, mode.one_tag ? 1 : std::max(before.visible, static_cast<int>(mode.keep_last) + 1) + 1);
  found.visible = visible;
  found.step = loaded_step(save_dir, stage, mode.tensor, sums);
  if (mode.tensor > 1 && found.step > 0) expect_whole_on_one_rank(save_dir, found.step, sums);
  EXPECT_EQ(found.step > 0, visible > 0);
  return found;
}

// Kills jobs in turn of the modes from `first` on. `test`: the name of the caller, which the job runs.
void expect_whole_after_kills(const std::string& test, int first, int modes, int kills) {
  const std::vector<uint64_t> sums = uninterrupted(mode_number(first).tensor);
  ASSERT_EQ(std::set<uint64_t>(sums.begin(), sums.end()).size(), sums.size());
  std::mt19937 random(20240229);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const test::ScratchFolder scratch;
  std::vector<Found> last(static_cast<size_t>(modes));
  int one_rank = 0, in_a_save = 0, before_the_first = 0;
  for (int number = 0; number < kills && !::testing::Test::HasFailure(); ++number) {
    const int kind = number % modes;
    const SaveMode mode = mode_number(first + kind);
    const std::string folder = scratch / cat("mode", kind);
    fs::create_directories(folder);
    SCOPED_TRACE(cat("kill ", number, ", mode ", kind));
    CrashingJob job(test, folder, first + kind, number);
    ASSERT_TRUE(job.await_ready()) << job.output();
    std::this_thread::sleep_for(std::chrono::microseconds(up_to(150000)));
    const int victim = up_to(1);
    job.send_kill(victim);
    if (up_to(2) == 0) {  // the other one is ended a while later, as a launcher does
      std::this_thread::sleep_for(std::chrono::milliseconds(30 + up_to(100)));
      ++one_rank;
    }
    job.send_kill(1 - victim);
    job.end(0);
    job.end(1);
    Found& before = last[static_cast<size_t>(kind)];
    const Found found = expect_whole(folder, mode, 1 + up_to(2), sums, before);
    EXPECT_GE(found.step, before.step) << "a checkpoint that was there is gone";
    EXPECT_GE(found.step, last_reported(folder)) << "a save that had returned is gone";
    before = found;
    in_a_save += found.incomplete > 0 ? 1 : 0;
    before_the_first += found.step == 0 ? 1 : 0;
    if (found.step > kMostSteps - 200) {  // begin again
      fs::remove_all(folder);
      before = {};
    }
  }
  std::cout << kills << " jobs killed, " << one_rank << " of them one rank first; " << in_a_save
            << " left an incomplete folder, " << before_the_first << " had no checkpoint yet; steps reached:";
  for (const Found& found : last) std::cout << " " << found.step;
  std::cout << '\n';
}

// How many jobs are killed.
int kills_or(int usual) {
  const std::string asked = environment("DS_CRASH_KILLS");
  return asked.empty() ? usual : std::stoi(asked);
}

TEST(CheckpointCrash, KilledAtAnyMoment) {
  if (!environment(kRank).empty()) return train_until_killed();
  expect_whole_after_kills("CheckpointCrash.KilledAtAnyMoment", 0, kModes, kills_or(30));
}

TEST(CheckpointCrash, KilledWhileTheySaveParts) {
  if (!environment(kRank).empty()) return train_until_killed();
  expect_whole_after_kills("CheckpointCrash.KilledWhileTheySaveParts", kModes, kTensorModes, kills_or(8));
}

}  // namespace
}  // namespace ds::engine
