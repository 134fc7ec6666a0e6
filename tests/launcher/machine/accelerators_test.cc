#include "launcher/machine/accelerators.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Accelerators, CountsDeviceFilesOnly) {
  std::string folder = ::testing::TempDir() + "ds_dev_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  for (const char* name : {"nvidia0", "nvidia12", "nvidia", "nvidiactl", "nvidia-uvm", "nvidia1x"}) {
    std::ofstream(folder + "/" + name);
  }
  EXPECT_EQ(count_gpu_devices(folder), 2);
  EXPECT_EQ(count_gpu_devices(folder + "/absent"), 0);
  std::filesystem::remove_all(folder);
}

TEST(Accelerators, VisibleDevicesAreReadAsCudaReadsThem) {
  EXPECT_THAT(visible_gpus(std::nullopt, 2), ElementsAre("0", "1"));
  EXPECT_THAT(visible_gpus("3, 1", 4), ElementsAre("3", "1"));
  EXPECT_THAT(visible_gpus("GPU-8932f937,MIG-a0", 4), ElementsAre("GPU-8932f937", "MIG-a0"));
  EXPECT_THAT(visible_gpus("2,-1,0", 4), ElementsAre("2"));
  EXPECT_THAT(visible_gpus("", 4), IsEmpty());
  EXPECT_THAT(visible_gpus("0,1", 0), IsEmpty());
}

TEST(Accelerators, ChoosesTheNumberOfRanks) {
  EXPECT_EQ(choose_rank_count(std::nullopt, false, {"0", "1", "2"}).ranks, 3);
  const RankCount alone = choose_rank_count(std::nullopt, false, {});
  EXPECT_EQ(alone.ranks, 1);
  EXPECT_THAT(alone.note, HasSubstr("--num_procs"));
  const RankCount shared = choose_rank_count(4, false, {"0"});
  EXPECT_EQ(shared.ranks, 4);
  EXPECT_THAT(shared.note,
              HasSubstr("share 1 GPU, which NCCL refuses: they train on it with \"communication_backend\""));
  EXPECT_THAT(choose_rank_count(4, false, {"0", "1"}).note, HasSubstr("ranks beyond the GPUs end with an error"));
  EXPECT_EQ(choose_rank_count(2, false, {"0", "1"}).note, "");
  EXPECT_THAT(choose_rank_count(2, true, {}).note, HasSubstr("no GPU"));
  EXPECT_THROW(choose_rank_count(2, true, {"0"}), ConfigError);
}

TEST(Accelerators, RanksSeeTheFirstDevices) {
  EXPECT_EQ(devices_of_ranks({"5", "3", "1"}, 2), "5,3");
  EXPECT_EQ(devices_of_ranks({"5"}, 4), "5");
  EXPECT_EQ(devices_of_ranks({}, 4), std::nullopt);
}

TEST(Accelerators, GpusOfSlots) {
  EXPECT_THAT(gpus_of_slots({"4", "5", "6"}, {0, 2}), ElementsAre("4", "6"));
  EXPECT_THAT(gpus_of_slots({}, {0, 7}), IsEmpty());
  EXPECT_THAT(test::thrown_by<Error>([] {
                gpus_of_slots({"4", "5"}, {1, 2});
              }),
              HasSubstr("slot 2 has no GPU: 2 visible"));
}

}  // namespace
}  // namespace ds::launcher
