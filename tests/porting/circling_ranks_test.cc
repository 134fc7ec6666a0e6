// Ranks whose programs part at stage 3 wait for each other in two groups, the world and that of gathers, and ranks of
// any stage where one waits for a message: the flight watch ends them as soon as it sees that, as stages 0 to 2, which
// have one group, end at once (parted_ranks_test.cc).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/factory.h"
#include "comm/flight/flight_watch.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/store_threads.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// What the program of one rank has at hand.
struct CirclingRank {
  Engine& engine;
  SmallNet& model;
  std::string folder;
  void backward() const { engine.backward(model->loss(sample(1, engine.global_rank()))); }
};

struct CirclingMistake {
  std::string name;
  std::string expected;                     // of the message on all ranks
  std::function<void(CirclingRank&)> make;  // on rank 1, before its second step
  int stage = 3;
};

// Far below 60 s, after which a stall is told by default. The watch needs about one second.
constexpr std::chrono::seconds kSoon(20);

void receive_alone(CirclingRank& rank) { rank.engine.world().recv(torch::ones({1}), /*source=*/0); }

// Throws in the middle of a backward pass, which the program catches, to go on with the next batch.
void fail_in_a_pass(CirclingRank& rank) {
  const at::Tensor output = rank.model->forward(sample(1, 1));
  output.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a sensor is off"); });
  EXPECT_THROW(rank.engine.backward(output.sum()), std::exception);
}

std::vector<CirclingMistake> circling_mistakes() {
  return {{"saves alone", "rank 0 is in the program (data, forward), rank 1 in save_checkpoint()",
           [](CirclingRank& rank) { rank.engine.save_checkpoint(rank.folder); }},
          {"reads alone", "rank 0 is in the program (data, forward), rank 1 in safe_get_full_fp32_param()",
           [](CirclingRank& rank) { rank.engine.safe_get_full_fp32_param(rank.model->first->weight); }},
          {"decides alone", "rank 1 waits in all_reduce 'agree() of the program'",
           [](CirclingRank& rank) { rank.engine.agree(true); }},
          {"has a metric of its own", "rank 1 waits in all_reduce 'accuracy'",
           [](CirclingRank& rank) {
             rank.engine.world().all_reduce(torch::ones({1}), comm::ReduceOp::kSum, "accuracy").wait();
           }},
          {"makes a group alone", "rank 1 waits in barrier 'new_group pair'",
           [](CirclingRank& rank) {
             rank.engine.world().new_group({0, 1}, "pair");
           }},
          {"receives alone", "rank 1 waits in recv", receive_alone},
          {"receives alone at stage 0", "rank 1 waits in recv", receive_alone, /*stage=*/0},
          {"accumulates otherwise", "rank 0 is in step(), rank 1 in the program (data, forward)",
           [](CirclingRank& rank) { rank.engine.set_gradient_accumulation_boundary(false); }},
          {"has a pass more", "rank 0 is in step(), rank 1 in the program (data, forward)",
           [](CirclingRank& rank) { rank.backward(); }},
          {"goes on after a pass that failed", "rank 0 is in backward(), rank 1 in the program (data, forward)",
           fail_in_a_pass}};
}

// Without a stall limit: nothing else ends ranks that wait.
void run_circling_rank(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& folder,
                       const CirclingMistake& mistake) {
  const comm::Rendezvous meeting = comm::rendezvous(store, rank, 2, std::chrono::seconds(30));
  const std::shared_ptr<comm::Communicator> world = comm::make_communicator(meeting, c10::kCPU, comm::Backend::kShm);
  comm::watch_flight(meeting, *world,
                     {.stall_limit = std::chrono::milliseconds(0),
                      .folder = folder + "/flight",
                      .stacks = false,
                      .end_process = false});
  SmallNet model;
  const auto engine =
      initialize({.model = model.ptr(), .config = small_config(mistake.stage, 1), .communicator = world}).engine;
  CirclingRank own{*engine, model, folder + "/checkpoints"};
  own.backward();
  engine->step();
  const auto go_on = [&] {
    if (rank == 1) mistake.make(own);
    for (int step = 0; step < 2; ++step) {
      own.backward();
      engine->step();
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(
      go_on, ThrowsMessage<std::exception>(AllOf(HasSubstr("ranks wait for each other"), HasSubstr(mistake.expected))));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

TEST(CirclingRanks, EndAsSoonAsTheyWaitForEachOther) {
  const test::ScratchFolder folder;
  const std::vector<CirclingMistake> mistakes = circling_mistakes();
  std::vector<std::thread> jobs;  // beside each other, because they do little but wait
  for (const CirclingMistake& mistake : mistakes) {
    jobs.emplace_back([&] {
      testing::on_store_threads(2, [&](const auto& store, int rank) {
        const ::testing::ScopedTrace trace(__FILE__, __LINE__, mistake.name);
        run_circling_rank(store, rank, folder / mistake.name, mistake);
      });
    });
  }
  for (std::thread& job : jobs) job.join();
}

}  // namespace
}  // namespace ds::engine
