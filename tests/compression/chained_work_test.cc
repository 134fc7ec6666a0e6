#include "compression/chained_work.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <vector>

namespace ds::compression {
namespace {

// An operation that is over when the test says so.
struct Gate final : comm::WorkState {
  bool open = false;
  int waits = 0;
  bool is_completed() override { return open; }
  void wait() override {
    ++waits;
    open = true;
  }
};

TEST(ChainedWork, RunsItsStepsInOrderAndTheLastOneInWaitOnly) {
  const auto first = std::make_shared<Gate>();
  const auto second = std::make_shared<Gate>();
  std::vector<int> done;
  const comm::Work work = chained(comm::Work(first), {[&] {
                                                        done.push_back(1);
                                                        return comm::Work(second);
                                                      },
                                                      [&]() -> comm::Work {
                                                        EXPECT_FALSE(at::GradMode::is_enabled());
                                                        done.push_back(2);
                                                        return {};
                                                      }});
  EXPECT_FALSE(work.is_ready());
  EXPECT_TRUE(done.empty());
  first->open = true;
  EXPECT_FALSE(work.is_ready());
  EXPECT_EQ(done, std::vector<int>{1});
  second->open = true;
  EXPECT_TRUE(work.is_ready());
  EXPECT_FALSE(work.is_completed());
  EXPECT_EQ(done, std::vector<int>{1});
  work.wait();
  EXPECT_TRUE(work.is_completed());
  EXPECT_EQ(done, (std::vector<int>{1, 2}));
  work.wait();
  EXPECT_EQ(done, (std::vector<int>{1, 2}));
}

TEST(ChainedWork, AStepThatThrowsRunsAgain) {
  int calls = 0;
  const comm::Work work = chained({}, {[&]() -> comm::Work {
                                         if (++calls <= 2) throw std::runtime_error("lost");
                                         return {};
                                       },
                                       []() -> comm::Work { return {}; }});
  EXPECT_TRUE(work.is_ready()) << "wait() is to say what is wrong";
  EXPECT_THROW(work.wait(), std::runtime_error);
  work.wait();
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace ds::compression
