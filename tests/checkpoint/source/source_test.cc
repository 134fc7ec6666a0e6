// Paths of tensors in a checkpoint.
#include <gtest/gtest.h>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {
namespace {

TEST(SourcePaths, NameWhatTheyHold) {
  EXPECT_EQ(weight_path("h.0.b"), "weights/h.0.b");
  EXPECT_EQ(state_path("exp_avg", "h.0.b"), "optimizer/exp_avg/h.0.b");
  EXPECT_EQ(rank_path(3, "rng.cpu"), "ranks/3/rng.cpu");
  EXPECT_EQ(name_in("weights/", weight_path("h.0.b")), "h.0.b");
  EXPECT_EQ(name_in("buffers/", weight_path("h.0.b")), "");
}

}  // namespace
}  // namespace ds::checkpoint
