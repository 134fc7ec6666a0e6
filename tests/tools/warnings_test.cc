#include "tools/report/warnings.h"

#include <gmock/gmock.h>

#include <map>

namespace ds::tool::report {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct WarningsTest : ::testing::Test {
  WarningsTest() {
    machine.processor.allowed_count = 8;
    machine.limits.locked_memory.soft = 8 << 20;
    machine.limits.open_files.soft = 1024;
    machine.limits.stack.soft = 8 << 20;
    machine.limits.shm = {.there = true, .bytes = int64_t{1} << 30, .free_bytes = int64_t{1} << 30};
    machine.limits.memory.takeable = int64_t{8} << 30;
    machine.limits.memory.takeable_limit = "MemAvailable";
    machine.limits.huge_pages = "madvise";
    machine.interfaces = {{.name = "eth0", .addresses = {"10.0.0.1"}, .state = "up"}};
    machine.gloo = machine.nccl = {{"eth0"}, "so"};
    machine.libraries = nlohmann::ordered_json::parse(
        R"({"backends": {"gloo": {"works": true}, "shm": {"works": true}, "nccl": {"works": false, "refusal": "no GPU"}},
            "cuda": {"loads": false, "refusal": "no libcudart"}})");
    machine.devices = {{"error", "no driver"}};
    machine.variables = [this](const char* name) -> std::optional<std::string> {
      const auto found = environment.find(name);
      return found == environment.end() ? std::nullopt : std::optional(found->second);
    };
  }

  Machine machine;
  std::map<std::string, std::string> environment;
};

TEST_F(WarningsTest, AreNoneOnAUsualMachineWithoutAGpu) { EXPECT_THAT(warnings_of(machine), IsEmpty()); }

TEST_F(WarningsTest, NameAContainersSmallSharedMemory) {
  machine.limits.shm = {.there = true, .bytes = 64 << 20, .free_bytes = 64 << 20};
  EXPECT_THAT(warnings_of(machine), ElementsAre(AllOf(HasSubstr("64.0 MiB free"), HasSubstr("--shm-size"))));
  machine.limits.shm.there = false;
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("/dev/shm is not there")));
}

TEST_F(WarningsTest, NameProcessLimits) {
  machine.limits.locked_memory.soft = 64 << 10;
  machine.limits.stack.soft = 1 << 20;
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("ulimit -l"), HasSubstr("ulimit -s")));
}

TEST_F(WarningsTest, WantUnlimitedLockedMemoryForRdma) {
  machine.limits.infiniband = true;
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("RDMA")));
  machine.limits.locked_memory.soft.reset();
  EXPECT_THAT(warnings_of(machine), IsEmpty());
}

TEST_F(WarningsTest, CountFilesByRanks) {
  environment["WORLD_SIZE"] = "512";
  EXPECT_THAT(warnings_of(machine), ElementsAre(AllOf(HasSubstr("limited to 1024"), HasSubstr("1280"))));
}

TEST_F(WarningsTest, NameMemoryAndKernelSettings) {
  machine.limits.memory.takeable = 1 << 20;
  machine.limits.overcommit = 2;
  machine.limits.huge_pages = "never";
  machine.limits.uring_refusal = "io_uring is not permitted here";
  machine.limits.ptrace_scope = 3;
  EXPECT_THAT(warnings_of(machine),
              ElementsAre(HasSubstr("1.0 MiB of memory"), HasSubstr("overcommit_memory"), HasSubstr("huge pages"),
                          HasSubstr("not permitted here"), HasSubstr("ptrace_scope")));
}

TEST_F(WarningsTest, CompareThreadsWithCpus) {
  machine.processor.quota = 2;
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("OMP_NUM_THREADS=2")));
  environment["OMP_NUM_THREADS"] = "4";
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("OMP_NUM_THREADS is 4")));
  environment["OMP_NUM_THREADS"] = "2";
  EXPECT_THAT(warnings_of(machine), IsEmpty());
}

TEST_F(WarningsTest, NameInterfacesThatAreNotThere) {
  machine.gloo = {{"eth7"}, "GLOO_SOCKET_IFNAME=eth7"};
  machine.nccl = {{}, "NCCL_SOCKET_IFNAME=mlx"};
  environment["NCCL_SOCKET_IFNAME"] = "mlx";
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("no interface eth7"), HasSubstr("NCCL_SOCKET_IFNAME=mlx")));
}

TEST_F(WarningsTest, NameInterfacesThatAreDown) {
  machine.interfaces[0].state = "down";
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("eth0 is down")));
}

TEST_F(WarningsTest, NameGpusThatCannotBeUsed) {
  machine.devices = nlohmann::ordered_json::parse(R"({"devices": [{"index": 0}]})");
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("no libcudart")));
  machine.libraries["cuda"] = {{"loads", true}, {"usable_devices", 0}};
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("CUDA_VISIBLE_DEVICES")));
  machine.libraries["cuda"]["usable_devices"] = 1;
  EXPECT_THAT(warnings_of(machine), IsEmpty());
}

TEST_F(WarningsTest, NameBrokenLibraries) {
  machine.libraries["backends"]["gloo"] = {{"works", false}, {"refusal", "no interface"}};
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("backend gloo does not work: no interface")));
  machine.libraries = {{"error", "ds-tool-libraries: exit code 127"}};
  EXPECT_THAT(warnings_of(machine), ElementsAre(HasSubstr("exit code 127")));
}

}  // namespace
}  // namespace ds::tool::report
