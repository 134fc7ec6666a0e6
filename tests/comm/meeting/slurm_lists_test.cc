#include "comm/meeting/started_place.h"

#include <gmock/gmock.h>

#include "tests/comm/meeting/variables.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SlurmLists, TheFirstHost) {
  EXPECT_EQ(first_slurm_host("vm", "X"), "vm");
  EXPECT_EQ(first_slurm_host("node[01-04,07],gpu-[1-2]", "X"), "node01");
  EXPECT_EQ(first_slurm_host("gpu-2,node[01-04]", "X"), "gpu-2");
  EXPECT_EQ(first_slurm_host("node[7,9-12]", "X"), "node7");
  EXPECT_EQ(first_slurm_host("rack[1-2]-node[003-004]-ib,other", "X"), "rack1-node003-ib");
  EXPECT_EQ(first_slurm_host("a.b-c.example.org,d", "X"), "a.b-c.example.org");
}

TEST(SlurmLists, AListThatIsNoneIsQuoted) {
  for (const char* list : {"", "node[", "node[01", "node[]", ",b", "node[-3]"}) {
    EXPECT_THAT(config_error_of([&] { first_slurm_host(list, "SLURM_X"); }),
                AllOf(HasSubstr("SLURM_X: expected names such as node[01-04,07]"), HasSubstr(cat("'", list, "'"))));
  }
}

TEST(SlurmLists, TasksOfANode) {
  EXPECT_EQ(slurm_tasks_on_node("4", 0, "X"), 4);
  const int expected[] = {2, 2, 2, 1, 8, 8};
  for (int node = 0; node < 6; ++node) EXPECT_EQ(slurm_tasks_on_node("2(x3),1,8(x2)", node, "X"), expected[node]);
}

TEST(SlurmLists, TasksThatAreNotThere) {
  EXPECT_THAT(config_error_of([] { slurm_tasks_on_node("2(x3)", 3, "SLURM_X"); }),
              AllOf(HasSubstr("SLURM_X"), HasSubstr("at least 4 nodes"), HasSubstr("'2(x3)'")));
  for (const char* list : {"two", "2(x", "2(xa)", "2(x3),", "(x3)"}) {
    EXPECT_THAT(config_error_of([&] { slurm_tasks_on_node(list, 5, "SLURM_X"); }), HasSubstr("SLURM_X: expected"));
  }
}

}  // namespace
}  // namespace ds::comm
