#include "tools/report/environment.h"

#include <gmock/gmock.h>

namespace ds::tool::report {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(TellingVariables, AreThoseThatChangeAJobSorted) {
  EXPECT_THAT(telling_variables({"NCCL_DEBUG=INFO", "HOME=/root", "DS_LOG_LEVEL=debug", "RANK=3", "RANKS=4", "broken",
                                 "MASTER_ADDR=10.0.0.1", "CUDA_VISIBLE_DEVICES="}),
              ElementsAre(Pair("CUDA_VISIBLE_DEVICES", ""), Pair("DS_LOG_LEVEL", "debug"),
                          Pair("MASTER_ADDR", "10.0.0.1"), Pair("NCCL_DEBUG", "INFO"), Pair("RANK", "3")));
}

TEST(TellingVariables, KeepSecretsToThemselves) {
  EXPECT_THAT(telling_variables({"DS_WANDB_API_KEY=abc"}), ElementsAre(Pair("DS_WANDB_API_KEY", "(not shown)")));
}

TEST(TellingVariables, GoIntoTheReport) {
  const Section section = describe(telling_variables({"OMP_NUM_THREADS=2"}));
  EXPECT_EQ(to_json(section)["variables"]["OMP_NUM_THREADS"], "2");
  EXPECT_EQ(section.facts()[0].lines[0], "OMP_NUM_THREADS=2");
}

}  // namespace
}  // namespace ds::tool::report
