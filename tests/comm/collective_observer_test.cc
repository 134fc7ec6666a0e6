// What observers see of a communicator, and what several of them see.
#include "comm/collective_observer.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/comm.h"
#include "tests/support/thread_ranks.h"

namespace ds::comm::testing {
namespace {

using ::testing::ElementsAre;

// Writes down what it is told, with its name in front.
class Notes final : public CollectiveObserver {
 public:
  Notes(std::string name, std::vector<std::string>& lines) : name_(std::move(name)), lines_(lines) {}

  int add_group(const std::string& name, const std::vector<int>& ranks, int own) override {
    std::string text = cat(name_, ": group ", name, " of");
    for (const int rank : ranks) text += cat(" ", rank);
    lines_.push_back(cat(text, ", own ", own));
    return groups_++;
  }
  Work observe(int group, Collective& collective, c10::function_ref<Work()> launch) override {
    const std::string text = cat(name_, ": ", name_of(collective.kind), " ", collective.label, " of group ", group);
    lines_.push_back(text + " begins");
    try {
      Work work = launch();
      lines_.push_back(text + " is issued");
      return work;
    } catch (const std::exception&) {
      lines_.push_back(text + " failed");
      throw;
    }
  }
  void phase(const char* name, int64_t step, int64_t micro_step) override {
    lines_.push_back(cat(name_, ": ", name, " of step ", step, ", micro-step ", micro_step));
  }

 private:
  std::string name_;
  std::vector<std::string>& lines_;
  int groups_ = 0;
};

TEST(CollectiveObserver, SeesGroupsCollectivesAndPhases) {
  test::run_ranks(3, [](Communicator& world) {
    std::vector<std::string> lines;
    world.observe_with(std::make_shared<Notes>("notes", lines));
    const auto pair = world.new_group({0, 2}, "pair");
    const at::Tensor tensor = at::ones({2});
    world.all_reduce(tensor, ReduceOp::kSum, "sum").wait();
    if (pair) pair->broadcast(tensor, 0, "weights").wait();
    world.note_phase("step", 7);
    if (world.rank() == 2) {
      EXPECT_THAT(lines,
                  ElementsAre("notes: group world of 0 1 2, own 2", "notes: barrier new_group pair of group 0 begins",
                              "notes: barrier new_group pair of group 0 is issued", "notes: group pair of 0 2, own 1",
                              "notes: all_reduce sum of group 0 begins", "notes: all_reduce sum of group 0 is issued",
                              "notes: broadcast weights of group 1 begins",
                              "notes: broadcast weights of group 1 is issued", "notes: step of step 7, micro-step -1"));
    }
  });
}

TEST(CollectiveObserver, TheFirstAttachedIsTheOutermost) {
  test::run_ranks(2, [](Communicator& world) {
    std::vector<std::string> lines;
    world.observe_with(std::make_shared<Notes>("one", lines));
    world.observe_with(std::make_shared<Notes>("two", lines));
    lines.clear();
    world.barrier("end");
    EXPECT_THAT(lines, ElementsAre("one: barrier end of group 0 begins", "two: barrier end of group 0 begins",
                                   "two: barrier end of group 0 is issued", "one: barrier end of group 0 is issued"));
  });
}

// A group knows the places of its ranks where each observer was attached.
TEST(CollectiveObserver, OneAttachedToAGroupCountsFromThatGroup) {
  test::run_ranks(4, [](Communicator& world) {
    std::vector<std::string> lines;
    world.observe_with(std::make_shared<Notes>("world", lines));
    const auto odd = world.new_group({1, 3}, "odd");
    if (!odd) return;
    odd->observe_with(std::make_shared<Notes>("odd", lines));
    lines.clear();
    const auto last = odd->new_group({1}, "last");
    std::vector<std::string> expected = {
        "world: barrier new_group last of group 1 begins", "odd: barrier new_group last of group 0 begins",
        "odd: barrier new_group last of group 0 is issued", "world: barrier new_group last of group 1 is issued"};
    if (last) expected.insert(expected.end(), {"world: group last of 3, own 0", "odd: group last of 1, own 0"});
    EXPECT_EQ(lines, expected);
  });
}

TEST(CollectiveObserver, SeesThatAnOperationIsRefused) {
  test::run_ranks(2, [](Communicator& world) {
    std::vector<std::string> lines;
    world.observe_with(std::make_shared<Notes>("notes", lines));
    lines.clear();
    EXPECT_THROW(world.all_reduce(at::ones({2}), ReduceOp::kBand, "bits"), UsageError);
    EXPECT_THAT(lines,
                ElementsAre("notes: all_reduce bits of group 0 begins", "notes: all_reduce bits of group 0 failed"));
  });
}

}  // namespace
}  // namespace ds::comm::testing
