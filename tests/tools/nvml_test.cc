#include "tools/report/libraries.h"

#include <gmock/gmock.h>

namespace ds::tool::report {
namespace {

using ::testing::HasSubstr;

TEST(Nvml, DescribesDevicesAndTheWaysBetweenThem) {
  const auto answer = ask_nvml(DS_FAKE_NVML);
  ASSERT_FALSE(answer.contains("error")) << answer;
  EXPECT_EQ(answer["driver"], "580.65.06");
  EXPECT_EQ(answer["cuda"], "13.1");
  ASSERT_EQ(answer["devices"].size(), 3U);
  EXPECT_EQ(answer["devices"][0]["name"], "Fake GPU");
  EXPECT_EQ(answer["devices"][0]["bytes"], int64_t{2} << 30);
  EXPECT_EQ(answer["devices"][0]["free"], int64_t{1} << 29);
  EXPECT_EQ(answer["devices"][0]["peers"]["1"], "NVLink");
  EXPECT_EQ(answer["devices"][0]["peers"]["2"], "PCIe, other NUMA node");
  EXPECT_EQ(answer["devices"][2]["peers"]["0"], "PCIe, other NUMA node");
}

TEST(Nvml, SaysWhyThereIsNone) {
  const auto answer = ask_nvml("/no/such/libnvidia-ml.so.1");
  EXPECT_THAT(answer["error"].get<std::string>(), HasSubstr("/no/such/libnvidia-ml.so.1"));
}

}  // namespace
}  // namespace ds::tool::report
