// The result of an optimizer does not depend on how slices cut parameters: ranks as threads.
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "tests/optim/sharded_model.h"

namespace ds::optimizers {
namespace {

// Where the threads of a world leave their tensors for each other.
struct Meeting {
  explicit Meeting(int world) : size(world), barrier(world), tensors(static_cast<size_t>(world)) {}
  int size;
  std::barrier<> barrier;
  std::vector<at::Tensor> tensors;
};

class ThreadExchange : public SliceExchange {
 public:
  ThreadExchange(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return meeting_->size; }
  void sum(const at::Tensor& values) override {
    const at::Tensor total = meet(values, [](const std::vector<at::Tensor>& all) { return at::stack(all).sum(0); });
    values.copy_(total);
  }
  at::Tensor all_gather(const at::Tensor& slice) override {
    return meet(slice, [](const std::vector<at::Tensor>& all) { return at::cat(all); });
  }

 private:
  template <class Join>
  at::Tensor meet(const at::Tensor& own, const Join& join) {
    meeting_->tensors[static_cast<size_t>(rank_)] = own.clone();
    meeting_->barrier.arrive_and_wait();
    at::Tensor joined = join(meeting_->tensors);
    meeting_->barrier.arrive_and_wait();
    return joined;
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_;
};

at::Tensor weights_of_world(int world, const OptimizerOptions& options, int64_t steps) {
  const auto meeting = std::make_shared<Meeting>(world);
  std::vector<at::Tensor> parts(static_cast<size_t>(world));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      const bool muon = options.type == "Muon";
      ShardedModel model(options, muon ? muon_buckets() : one_bucket(),
                         std::make_shared<ThreadExchange>(meeting, rank));
      model.run(1, steps + 1, at::kFloat, 0.25);
      parts[static_cast<size_t>(rank)] = model.weights();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return at::stack(parts).sum(0);
}

class Slices : public testing::TestWithParam<std::string> {};

TEST_P(Slices, TheirNumberDoesNotChangeTheResult) {
  OptimizerOptions options{.type = GetParam(), .groups = {default_group_options(GetParam())}};
  options.groups[0].lr = 0.02;
  options.groups[0].weight_decay = 0.1;
  if (GetParam() == "SGD") options.groups[0].momentum = 0.9;
  if (GetParam() == "Muon") options.groups.push_back(default_aux_adam_options());
  const at::Tensor alone = weights_of_world(1, options, 20);
  for (const int world : {2, 3, 4, 7}) {
    const double error = (weights_of_world(world, options, 20) - alone).abs().max().item<double>();
    RecordProperty("world_" + std::to_string(world), std::to_string(error * 1e9) + "e-9");
    EXPECT_LE(error, 5e-7) << "world " << world;
  }
}

TEST(SlicesOfMuon, CutHeadsAnywhere) {
  const OptimizerOptions options{.type = "Muon",
                                 .groups = {default_group_options("Muon"), default_aux_adam_options()},
                                 .block_rows = {3, 5, 0, 0, 1, 0}};
  const at::Tensor alone = weights_of_world(1, options, 5);
  for (const int world : {2, 3, 7}) {
    EXPECT_LE((weights_of_world(world, options, 5) - alone).abs().max().item<double>(), 5e-7) << "world " << world;
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Slices,
                         testing::Values("Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon", "RMSprop", "Adamax",
                                         "NAdam", "RAdam", "Adadelta"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ds::optimizers
