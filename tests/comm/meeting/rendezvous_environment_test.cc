// env:// where several programs may have started the process: ds-launch and torchrun, or srun and mpirun.
#include <gmock/gmock.h>

#include "comm/meeting/rendezvous_address.h"
#include "tests/comm/meeting/variables.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Variables kLaunched = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29501"}};
const Variables kStep = {{"SLURM_JOB_ID", "10"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "1"},
                         {"SLURM_STEP_NUM_TASKS", "4"},
                         {"SLURM_STEP_NUM_NODES", "2"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "0"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_NNODES", "2"},
                         {"SLURM_STEP_NODELIST", "n[4-5]"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};
const Variables kHydraRank = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};

RendezvousAddress address_of(const Variables& variables, const std::string& init_method = "env://") {
  return parse_rendezvous(init_method, reader_of(variables));
}

std::string refusal_by_env(const Variables& variables) {
  return config_error_of([&] { address_of(variables); });
}

// A pod of Kubeflow's PyTorchJob with one process: its variables, and no LOCAL_RANK.
TEST(RendezvousEnvironment, APodOfKubeflow) {
  const RendezvousAddress address = address_of({{"MASTER_ADDR", "job-master-0"},
                                                {"MASTER_PORT", "23456"},
                                                {"WORLD_SIZE", "3"},
                                                {"RANK", "2"},
                                                {"PET_NNODES", "3"},
                                                {"PET_NPROC_PER_NODE", "1"}});
  EXPECT_EQ(address.host, "job-master-0");
  EXPECT_EQ(address.port, 23456);
  EXPECT_EQ(address.rank, 2);
  EXPECT_EQ(address.world_size, 3);
}

TEST(RendezvousEnvironment, AStepOfSlurm) {
  const RendezvousAddress address = address_of(kStep);
  EXPECT_EQ(address.place, MeetingPlace::kTcp);
  EXPECT_EQ(address.rank, 1);
  EXPECT_EQ(address.world_size, 4);
  EXPECT_EQ(address.local_rank, 1);
  EXPECT_EQ(address.local_world_size, 2);
  EXPECT_EQ(address.host, "n4");
  EXPECT_EQ(address.port, 20160);
  EXPECT_TRUE(address.rank_zero_listens);
}

TEST(RendezvousEnvironment, AShellOfSlurmIsAlone) {
  const Variables salloc = {
      {"SLURM_JOB_ID", "10"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}};
  EXPECT_EQ(address_of(salloc).place, MeetingPlace::kAlone);
  EXPECT_EQ(address_of(changed(salloc, {{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}})).place,
            MeetingPlace::kAlone);
}

TEST(RendezvousEnvironment, TheMasterThatIsSetWins) {
  const RendezvousAddress address = address_of(changed(kStep, {{"MASTER_ADDR", "10.0.0.9"}, {"MASTER_PORT", "7"}}));
  EXPECT_EQ(address.host, "10.0.0.9");
  EXPECT_EQ(address.port, 7);
  EXPECT_EQ(address.rank, 1);
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"MASTER_PORT", "0"}})), HasSubstr("MASTER_PORT"));
}

TEST(RendezvousEnvironment, WhereNothingSaysTheMasterItIsAskedFor) {
  EXPECT_THAT(refusal_by_env(kHydraRank),
              AllOf(HasSubstr("MASTER_ADDR is missing for rank 1 of 2"), HasSubstr("-genv")));
  EXPECT_EQ(address_of(changed(kHydraRank, {{"MASTER_ADDR", "a"}})).host, "a");
}

TEST(RendezvousEnvironment, RankAndWorldSizeWinOverTheStarter) {
  for (const Variables& starter : {kStep, kHydraRank, changed(kStep, kHydraRank)}) {
    const RendezvousAddress address = address_of(changed(starter, kLaunched));
    EXPECT_EQ(address.rank, 3);
    EXPECT_EQ(address.world_size, 8);
    EXPECT_EQ(address.local_rank, 1);
    EXPECT_EQ(address.host, "node0");
    EXPECT_EQ(address.port, 29501);
  }
  EXPECT_EQ(address_of(changed(kStep, {{"RANK", "0"}, {"WORLD_SIZE", "1"}})).place, MeetingPlace::kAlone);
}

TEST(RendezvousEnvironment, RankAndWorldSizeDoNotBorrowTheMaster) {
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"RANK", "3"}, {"WORLD_SIZE", "8"}})),
              HasSubstr("MASTER_ADDR, MASTER_PORT is missing"));
}

TEST(RendezvousEnvironment, PartOfTheVariablesMayAgree) {
  EXPECT_EQ(address_of(changed(kStep, {{"WORLD_SIZE", "4"}})).rank, 1);
  EXPECT_EQ(address_of(changed(kStep, {{"LOCAL_RANK", "1"}})).local_rank, 1);
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"WORLD_SIZE", "8"}})),
              AllOf(HasSubstr("WORLD_SIZE=8, but SLURM says 4"), HasSubstr("SLURM_PROCID, SLURM_STEP_NUM_TASKS")));
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"RANK", "2"}})), HasSubstr("RANK=2, but SLURM says 1"));
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"LOCAL_RANK", "0"}})), HasSubstr("LOCAL_RANK=0, but SLURM says 1"));
}

TEST(RendezvousEnvironment, AWrongPlaceNamesWhoSaidIt) {
  EXPECT_THAT(refusal_by_env(changed(kStep, {{"SLURM_PROCID", "4"}})),
              AllOf(HasSubstr("SLURM: SLURM_PROCID, SLURM_STEP_NUM_TASKS"), HasSubstr("rank in [0, 4)")));
}

TEST(RendezvousEnvironment, TcpAndFileTakeTheRestFromTheStarter) {
  const RendezvousAddress address = address_of(kStep, "tcp://node7:1234");
  EXPECT_EQ(address.rank, 1);
  EXPECT_EQ(address.world_size, 4);
  EXPECT_EQ(address.local_rank, 1);
  EXPECT_EQ(address.host, "node7");
  EXPECT_EQ(address_of(kHydraRank, "file:///shared/meeting").rank, 1);
  EXPECT_EQ(address_of(changed(kStep, {{"SLURM_PROCID", "x"}}), "tcp://a:1?rank=2&world_size=3").rank, 2);
}

TEST(RendezvousEnvironment, WorkersOfTorchrunConnectToItsAgent) {
  const RendezvousAddress address = address_of(changed(
      kLaunched, {{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_FALSE(address.rank_zero_listens);
  EXPECT_EQ(address.prefix, "/worker/attempt_2");
  const RendezvousAddress without =
      address_of(changed(kLaunched, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}, {"TORCHELASTIC_RESTART_COUNT", "0"}}));
  EXPECT_TRUE(without.rank_zero_listens);
  EXPECT_EQ(without.prefix, "");
}

}  // namespace
}  // namespace ds::comm
