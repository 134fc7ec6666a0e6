#include "launcher/program/rank_environment.h"

#include <gmock/gmock.h>

namespace ds::launcher {
namespace {

using ::testing::Contains;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

const JobEnvironment kJob = {.master_addr = "127.0.0.1",
                             .master_port = 29500,
                             .cuda_visible_devices = std::nullopt,
                             .launch_id = "1.2",
                             .flight_job = "3.4"};

TEST(RankEnvironment, SetsWhatDeepSpeedSets) {
  const RankPlace place{.rank = 5, .world_size = 8, .local_rank = 1, .local_size = 4, .cross_rank = 1, .cross_size = 2};
  EXPECT_THAT(rank_environment({"HOME=/root"}, kJob, place, 3),
              UnorderedElementsAre("HOME=/root", "RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_SIZE=4",
                                   "LOCAL_WORLD_SIZE=4", "CROSS_RANK=1", "CROSS_SIZE=2", "MASTER_ADDR=127.0.0.1",
                                   "MASTER_PORT=29500", "OMP_NUM_THREADS=3", "DS_LAUNCH_ID=1.2", "DS_FLIGHT_JOB=3.4"));
}

TEST(RankEnvironment, HasTheSecretOfThisStart) {
  JobEnvironment job = kJob;
  EXPECT_THAT(rank_environment({"DS_JOB_SECRET=of all hosts"}, job, {}, std::nullopt),
              Contains("DS_JOB_SECRET=of all hosts"));
  job.secret = "new";
  const auto environment = rank_environment({"DS_JOB_SECRET=of an outer job"}, job, {}, std::nullopt);
  EXPECT_THAT(environment, Contains("DS_JOB_SECRET=new"));
  EXPECT_THAT(environment, Not(Contains("DS_JOB_SECRET=of an outer job")));
}

TEST(RankEnvironment, ReplacesInheritedValues) {
  JobEnvironment job = kJob;
  job.cuda_visible_devices = "2,3";
  const auto environment =
      rank_environment({"RANK=9", "RANKS=keep", "CUDA_VISIBLE_DEVICES=0", "DS_LAUNCH_ID=0.1", "OMP_NUM_THREADS=8"}, job,
                       {}, std::nullopt);
  EXPECT_THAT(environment, Contains("RANK=0"));
  EXPECT_THAT(environment, Not(Contains("RANK=9")));
  EXPECT_THAT(environment, Contains("RANKS=keep"));
  EXPECT_THAT(environment, Contains("CUDA_VISIBLE_DEVICES=2,3"));
  EXPECT_THAT(environment, Not(Contains("CUDA_VISIBLE_DEVICES=0")));
  EXPECT_THAT(environment, Contains("DS_LAUNCH_ID=0.1,1.2"));
  EXPECT_THAT(environment, Contains("OMP_NUM_THREADS=8"));
}

TEST(RankEnvironment, GpusGetQueuesAndMemoryThatGrowsUnlessTheUserSaysOtherwise) {
  constexpr const char* kQueues = "CUDA_DEVICE_MAX_CONNECTIONS=32";
  constexpr const char* kGrowing = "PYTORCH_ALLOC_CONF=expandable_segments:True";
  JobEnvironment job = kJob;
  const auto without_gpus = rank_environment({}, job, {}, std::nullopt);
  EXPECT_THAT(without_gpus, Not(Contains(kQueues)));
  EXPECT_THAT(without_gpus, Not(Contains(kGrowing)));
  job.cuda_visible_devices = "0,1";
  const auto plain = rank_environment({}, job, {}, std::nullopt);
  EXPECT_THAT(plain, Contains(kQueues));
  EXPECT_THAT(plain, Contains(kGrowing));
  for (const char* own : {"PYTORCH_ALLOC_CONF=", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"}) {
    const auto said = rank_environment({own, "CUDA_DEVICE_MAX_CONNECTIONS=1"}, job, {}, std::nullopt);
    EXPECT_THAT(said, Contains(own));
    EXPECT_THAT(said, Not(Contains(kGrowing)));
    EXPECT_THAT(said, Contains("CUDA_DEVICE_MAX_CONNECTIONS=1"));
    EXPECT_THAT(said, Not(Contains(kQueues)));
  }
}

// Whatever started ds-launch: the ranks know their place from RANK and WORLD_SIZE, which win over the variables of srun
// and mpirun, and they meet where ds-launch says.
TEST(RankEnvironment, InsideOtherLaunchers) {
  const auto environment =
      rank_environment({"SLURM_PROCID=5", "OMPI_COMM_WORLD_RANK=5", "TORCHELASTIC_USE_AGENT_STORE=True",
                        "MASTER_ADDR=node9", "DS_RESTART_FILE=/tmp/outer", "DS_FLIGHT_JOB=outer"},
                       kJob, {}, std::nullopt);
  EXPECT_THAT(environment, Contains("RANK=0"));
  EXPECT_THAT(environment, Contains("WORLD_SIZE=1"));
  EXPECT_THAT(environment, Contains("MASTER_ADDR=127.0.0.1"));
  EXPECT_THAT(environment, Contains("SLURM_PROCID=5"));
  EXPECT_THAT(environment, Not(Contains("TORCHELASTIC_USE_AGENT_STORE=True")));
  EXPECT_THAT(environment, Not(Contains("DS_RESTART_FILE=/tmp/outer")));
  EXPECT_THAT(environment, Contains("DS_FLIGHT_JOB=3.4"));
  EXPECT_THAT(environment, Not(Contains("DS_FLIGHT_JOB=outer")));
}

TEST(RankEnvironment, SharesTheCoresAmongThreads) {
  EXPECT_EQ(omp_threads({}, 8, 2, 0), 4);
  EXPECT_EQ(omp_threads({}, 2, 4, 0), 1);
  EXPECT_EQ(omp_threads({"OMP_NUM_THREADS=3"}, 8, 2, 0), std::nullopt);
  EXPECT_EQ(omp_threads({"OMP_NUM_THREADS="}, 8, 2, 0), 4);
  EXPECT_EQ(omp_threads({"OMP_NUM_THREADS=3"}, 8, 2, 4), 4);
}

TEST(RankEnvironment, FindsValues) {
  EXPECT_EQ(environment_value({"AB=1", "A=2"}, "A"), "2");
  EXPECT_EQ(environment_value({"A="}, "A"), "");
  EXPECT_EQ(environment_value({"AB=1"}, "A"), std::nullopt);
}

}  // namespace
}  // namespace ds::launcher
