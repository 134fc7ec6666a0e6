// The variables are those that SLURM 22.05, Open MPI 4.1 and 5.0, MPICH 4.0 and Intel MPI 2021 set.
#include "comm/meeting/started_place.h"

#include <gmock/gmock.h>

#include "tests/comm/meeting/variables.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Variables kSlurm = {{"SLURM_JOB_ID", "1000"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "7"},
                          {"SLURM_STEP_NUM_TASKS", "7"},
                          {"SLURM_STEP_NUM_NODES", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                          {"SLURM_STEP_NODELIST", "node[03-06]"},
                          {"SLURM_JOB_NODELIST", "node[01-06]"}};

constexpr const char* kUriHere = "1232928768.0;tcp://10.77.0.1:54565;tcp6://[fd00::2]:35913";
constexpr const char* kUriThere = "1232928768.1;tcp://10.77.0.2:40001";

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "1232928769"},
                            {"OMPI_MCA_orte_hnp_uri", kUriHere},
                            {"OMPI_MCA_orte_local_daemon_uri", kUriThere}};

const Variables kHydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

std::optional<StartedPlace> place_of(const Variables& variables) { return started_place(reader_of(variables)); }

std::string refusal_of(const Variables& variables) {
  return config_error_of([&] { place_of(variables); });
}

const Variables kLsf = {{"LSB_JOBID", "4242"},
                        {"LSB_MCPU_HOSTS", "batch5 1 a01 42 a02 42"},
                        {"JSM_NAMESPACE_RANK", "9"},
                        {"JSM_NAMESPACE_SIZE", "12"},
                        {"JSM_NAMESPACE_LOCAL_RANK", "3"},
                        {"JSM_NAMESPACE_LOCAL_SIZE", "6"}};

TEST(StartedPlace, ATaskOfLsf) {
  const auto place = place_of(kLsf);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 9);
  EXPECT_EQ(place->world_size, 12);
  EXPECT_EQ(place->local_rank, 3);
  EXPECT_EQ(place->local_world_size, 6);
  EXPECT_EQ(place->host, "a01");
  EXPECT_EQ(place->port, 20000 + 4242);
  EXPECT_EQ(place_of(changed(kLsf, {{"LSB_MCPU_HOSTS", "a01 6"}}))->host, "a01");
  EXPECT_EQ(place_of(changed(kLsf, {{"LSB_MCPU_HOSTS", "a01 1"}}))->host, "a01");
  EXPECT_EQ(place_of(changed(kLsf, {{"LSB_MCPU_HOSTS", "a01 42 a02 42"}}))->host, "a01") << "no host of the script";
  EXPECT_EQ(place_of(changed(kLsf, {{"LSB_MCPU_HOSTS", ""}}))->host, "");
  EXPECT_EQ(place_of(changed(kLsf, {{"JSM_NAMESPACE_LOCAL_SIZE", "12"}}))->host, "127.0.0.1");
  // jsrun sets Open MPI's variables, too.
  EXPECT_EQ(place_of(changed(kLsf, {{"OMPI_COMM_WORLD_RANK", "9"}, {"OMPI_COMM_WORLD_SIZE", "12"}}))->host, "a01");
  EXPECT_THAT(refusal_of(changed(kLsf, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}})),
              HasSubstr("LSF's jsrun says rank 9 of 12"));
  EXPECT_FALSE(place_of({{"LSB_JOBID", "4242"}, {"LSB_MCPU_HOSTS", "a01 6"}}));
}

TEST(StartedPlace, NobodyStartedIt) { EXPECT_FALSE(place_of({{"PATH", "/bin"}, {"SLURM_JOB_ID", "7"}})); }

TEST(StartedPlace, ATaskOfAStep) {
  const auto place = place_of(kSlurm);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 5);
  EXPECT_EQ(place->world_size, 7);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_world_size, 2);
  EXPECT_EQ(place->host, "node03");
  EXPECT_EQ(place->port, 20000 + 16 * 1000 % 12000);
}

TEST(StartedPlace, StepsOfAJobHavePortsOfTheirOwn) {
  EXPECT_EQ(place_of(changed(kSlurm, {{"SLURM_STEP_ID", "3"}}))->port, place_of(kSlurm)->port + 3);
  for (const char* job : {"1", "749", "750", "4294967295"}) {
    const int port = place_of(changed(kSlurm, {{"SLURM_JOB_ID", job}}))->port;
    EXPECT_GE(port, 20000);
    EXPECT_LT(port, 32000);
  }
}

TEST(StartedPlace, AStepOnOneNodeNeedsNoName) {
  EXPECT_EQ(place_of(changed(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"}}))->host, "127.0.0.1");
  EXPECT_EQ(place_of(changed(kSlurm, {{"SLURM_STEP_NODELIST", ""}}))->host, "node01");
  EXPECT_EQ(place_of(changed(kSlurm, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_JOB_NODELIST", ""}}))->host, "");
}

TEST(StartedPlace, OnlyAStepOfSlurmCounts) {
  const Variables salloc = {{"SLURM_JOB_ID", "2"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "vm"}};
  EXPECT_FALSE(place_of(salloc));
  EXPECT_FALSE(place_of(changed(salloc, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}))) << "the script of sbatch";
  const auto shell = place_of(changed(salloc, {{"SLURM_PROCID", "0"},
                                               {"SLURM_STEP_ID", "4294967290"},
                                               {"SLURM_STEP_NUM_TASKS", "1"},
                                               {"SLURM_STEP_NUM_NODES", "1"}}));
  ASSERT_TRUE(shell) << "a shell of salloc that is a step of one task";
  EXPECT_EQ(shell->world_size, 1);
}

TEST(StartedPlace, WrongVariablesOfSlurmAreNamed) {
  EXPECT_THAT(refusal_of(changed(kSlurm, {{"SLURM_PROCID", "x"}})), HasSubstr("SLURM_PROCID: expected an integer"));
  EXPECT_THAT(refusal_of(changed(kSlurm, {{"SLURM_PROCID", ""}})), HasSubstr("but SLURM_PROCID is missing"));
  EXPECT_THAT(refusal_of(changed(kSlurm, {{"SLURM_STEP_NODELIST", "node["}})), HasSubstr("SLURM_STEP_NODELIST"));
  EXPECT_THAT(refusal_of(changed(kSlurm, {{"SLURM_NODEID", "9"}})), HasSubstr("SLURM_STEP_TASKS_PER_NODE"));
}

TEST(StartedPlace, ARankOfOpenMpi) {
  const auto place = place_of(kOpenMpi);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 3);
  EXPECT_EQ(place->world_size, 4);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_world_size, 2);
  EXPECT_EQ(place->host, "10.77.0.1") << "where mpirun is: rank 0 fails if it is elsewhere";
  EXPECT_GE(place->port, 20000);
  EXPECT_LT(place->port, 32000);
  EXPECT_NE(place->port, place_of(changed(kOpenMpi, {{"PMIX_NAMESPACE", "1232928770"}}))->port);
  EXPECT_EQ(place_of(changed(kOpenMpi, {{"PMIX_NAMESPACE", ""}}))->port, 29500);
}

TEST(StartedPlace, RanksOfOpenMpiOnOneHostMeetOnTheLoopback) {
  EXPECT_EQ(place_of(changed(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}, {"OMPI_MCA_orte_hnp_uri", ""}}))->host,
            "127.0.0.1");
}

TEST(StartedPlace, WhatOpenMpiDoesNotSayIsAskedFor) {
  const Variables zero = changed(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_EQ(place_of(changed(zero, {{"OMPI_MCA_orte_local_daemon_uri", kUriHere}}))->host, "10.77.0.1");
  const auto elsewhere = place_of(zero);
  EXPECT_EQ(elsewhere->host, "");
  EXPECT_THAT(elsewhere->why_no_host, AllOf(HasSubstr("another host than mpirun"), HasSubstr("-x MASTER_ADDR=")));
  const auto many = place_of(changed(kOpenMpi, {{"OMPI_MCA_orte_hnp_uri", "1.0;tcp://10.0.0.1,172.17.0.1:99"}}));
  EXPECT_EQ(many->host, "");
  EXPECT_THAT(many->why_no_host, AllOf(HasSubstr("10.0.0.1,172.17.0.1"), HasSubstr("-x MASTER_ADDR=")));
  const auto none = place_of(changed(kOpenMpi, {{"OMPI_MCA_orte_hnp_uri", ""}}));
  EXPECT_THAT(none->why_no_host, HasSubstr("OMPI_MCA_orte_hnp_uri"));
}

TEST(StartedPlace, ARankOfOpenMpi5) {
  const Variables remote = changed(kOpenMpi, {{"OMPI_MCA_orte_hnp_uri", ""},
                                              {"OMPI_MCA_orte_local_daemon_uri", ""},
                                              {"PMIX_NAMESPACE", "prterun-gpu-node-7-20176@1"},
                                              {"PMIX_SERVER_URI2", "prterun-gpu-node-7-20176@0.1;tcp4://127.0.0.1:5"}});
  EXPECT_EQ(place_of(remote)->host, "gpu-node-7");
  const Variables zero = changed(remote, {{"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_THAT(place_of(zero)->why_no_host, HasSubstr("another host than mpirun"));
  const Variables here = changed(zero, {{"PMIX_SERVER_URI2", "prterun-gpu-node-7-20176@0.0;tcp4://127.0.0.1:58271"}});
  EXPECT_EQ(place_of(here)->host, "gpu-node-7");
  EXPECT_EQ(place_of(here)->port, place_of(remote)->port);
}

TEST(StartedPlace, ARankOfHydra) {
  const auto place = place_of(kHydra);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 1);
  EXPECT_EQ(place->world_size, 2);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_world_size, 2);
  EXPECT_EQ(place->host, "127.0.0.1");
  EXPECT_EQ(place->port, 29500);
  EXPECT_NE(place_of(changed(kHydra, {{"I_MPI_HYDRA_UUID", "104c0000-2834-79e8-db60-0600f9c38750"}}))->port,
            place_of(changed(kHydra, {{"I_MPI_HYDRA_UUID", "104c0000-2834-79e8-db60-0600f9c38751"}}))->port);
  const auto hosts = place_of(changed(kHydra, {{"MPI_LOCALNRANKS", "1"}, {"MPI_LOCALRANKID", "0"}}));
  EXPECT_EQ(hosts->host, "");
  EXPECT_THAT(hosts->why_no_host, HasSubstr("-genv MASTER_ADDR"));
}

TEST(StartedPlace, HalfAPlaceIsNone) {
  EXPECT_THAT(refusal_of({{"PMI_RANK", "0"}}), HasSubstr("PMI_RANK is set, but PMI_SIZE is missing"));
  EXPECT_THAT(refusal_of({{"OMPI_COMM_WORLD_SIZE", "2"}}), HasSubstr("but OMPI_COMM_WORLD_RANK is missing"));
}

// mpirun inside a SLURM job starts its daemons with srun, one on each node, and ranks inherit the daemon's variables.
TEST(StartedPlace, AnMpirunInsideAStepWins) {
  const Variables daemon = {{"SLURM_STEP_ID", "0"},        {"SLURM_PROCID", "0"},         {"SLURM_STEP_NUM_TASKS", "1"},
                            {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_STEP_NODELIST", "vm"}, {"SLURM_JOB_ID", "3"}};
  EXPECT_EQ(place_of(changed(kHydra, daemon))->rank, 1);
  EXPECT_EQ(place_of(changed(kOpenMpi, daemon))->starter, "Open MPI");
}

TEST(StartedPlace, AStepWithPmi2SaysTheSameTwice) {
  const auto place = place_of(changed(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "7"}}));
  EXPECT_EQ(place->rank, 5);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->host, "node03");
}

TEST(StartedPlace, AContradictionNamesBoth) {
  EXPECT_THAT(refusal_of(changed(kSlurm, kOpenMpi)),
              AllOf(HasSubstr("Open MPI says rank 3 of 4 (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"),
                    HasSubstr("SLURM says rank 5 of 7 (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"),
                    HasSubstr("RANK and WORLD_SIZE")));
  EXPECT_THAT(refusal_of(changed(kHydra, kOpenMpi)), AllOf(HasSubstr("Open MPI"), HasSubstr("PMI_RANK, PMI_SIZE")));
}

}  // namespace
}  // namespace ds::comm
