// Several ranks, each on a GPU of its own, joined by NCCL, against the same training on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/flight/flight_recorder.h"
#include "core/device/transfer_stream.h"
#include "tests/gpu/collective_checks.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::on_gpus;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(NcclRanks, CarryEveryCollective) {
  for (const int world : {2, 3}) {
    on_gpus(world, [](comm::Communicator& ranks, at::Device device) { test::expect_every_collective(ranks, device); });
  }
}

// wait() orders streams only: an operation may be under way when its group ends (the last step's all_gather).
TEST(NcclRanks, WhatIsUnderWayArrivesBeforeAGroupEnds) {
  for (int round = 0; round < 5; ++round) {
    on_gpus(2, [](comm::Communicator& ranks, at::Device device) {
      const at::Tensor own = at::full({1 << 16}, ranks.rank() + 1.0F, at::TensorOptions(device));
      const at::Tensor all = at::zeros({2 << 16}, at::TensorOptions(device));
      {
        const std::shared_ptr<comm::Communicator> short_lived = ranks.new_group({0, 1}, "short");
        short_lived->all_gather(all, own, "the last one").wait();
      }
      const at::Tensor found = all.cpu();
      EXPECT_TRUE(found.narrow(0, 0, 1 << 16).eq(1.0).all().item<bool>()) << "rank " << ranks.rank();
      EXPECT_TRUE(found.narrow(0, 1 << 16, 1 << 16).eq(2.0).all().item<bool>()) << "rank " << ranks.rank();
    });
  }
}

// Rank 1 issues nothing that rank 0 could come to an end with, and lives on until rank 0 has ended its group. Two
// seconds after the timeout such an operation ends the process.
void expect_an_end(std::chrono::milliseconds timeout,
                   const std::function<void(comm::Communicator& ranks, at::Device device)>& on_rank_0) {
  testing::on_store_threads(2, [&](const auto& store, int rank) {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const at::Tensor ones = at::ones({1 << 10}, at::TensorOptions(device));
    std::shared_ptr<comm::Communicator> ranks = comm::cuda_plugin().make_nccl_communicator(
        {.store = store, .rank = rank, .size = 2, .device = device, .timeout = timeout});
    ranks->all_reduce(ones).wait();
    ones.cpu();
    const std::shared_ptr<comm::Communicator> part = ranks->new_group({0, 1}, "part");
    if (rank == 1) return store->wait({"rank 0 has ended"}, std::chrono::seconds(60));
    comm::Work given_up = ranks->all_reduce(ones);
    on_rank_0(*part, device);
    ranks.reset();
    given_up.wait();
    ones.cpu();  // before its memory goes
    store->set("rank 0 has ended", std::string("yes"));
  });
}

TEST(NcclRanks, TheEndOfAGroupDoesNotWaitForRanksThatDoNotCome) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "a GPU's own watchdog may end the process first";
  ::testing::internal::CaptureStderr();
  expect_an_end(std::chrono::milliseconds(300), [](comm::Communicator&, at::Device) {});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::HasSubstr("are given up"));
}

// The error of the group beside it was caught; what it tells holds for both.
TEST(NcclRanks, AfterAnErrorOfAGroupBesideItTheEndWaitsForNobody) {
  if (!test::device_is_simulated()) GTEST_SKIP() << "a GPU's own watchdog may end the process first";
  ::testing::internal::CaptureStderr();
  expect_an_end(std::chrono::milliseconds(1500), [](comm::Communicator& part, at::Device device) {
    EXPECT_THROW(part.isend(at::ones({4}, at::TensorOptions(device)), 1), CommError) << "rank 1 does not come";
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::Not(::testing::HasSubstr("are given up")));
}

// On one stream, a receive would hold up what the rank issues behind it: what the other one waits for.
TEST(NcclRanks, MessagesAndCollectivesDoNotWaitForOneAnother) {
  constexpr int64_t kMany = int64_t{1} << 22;  // more than NCCL sends ahead of its receiver
  on_gpus(3, [](comm::Communicator& ranks, at::Device device) {
    const int rank = ranks.rank();
    const at::TensorOptions there = at::TensorOptions(device);
    at::Tensor got = at::zeros({kMany}, there);
    at::Tensor sum = at::ones({1 << 10}, there);
    if (rank < 2) {  // both send first
      const comm::Work sent = ranks.isend(at::full({kMany}, rank + 1.0F, there), 1 - rank);
      ranks.irecv(got, 1 - rank).wait();
      sent.wait();
      EXPECT_TRUE(got.eq(2.0 - rank).all().item<bool>());
    }
    // Rank 1 has come to a message from rank 0 before it sends to rank 2, which rank 0 waits for.
    at::Tensor next = at::zeros({kMany}, there);
    if (rank == 0) {
      ranks.irecv(got, 2).wait();
      ranks.isend(got + 1, 1).wait();
    } else if (rank == 1) {
      const comm::Work late = ranks.irecv(next, 0);
      ranks.isend(at::full({kMany}, 5.0F, there), 2).wait();
      ranks.all_reduce(sum).wait();
      late.wait();
      EXPECT_TRUE(next.eq(6.0).all().item<bool>());
    } else {
      ranks.irecv(got, 1).wait();
      ranks.isend(got, 0).wait();
    }
    if (rank != 1) ranks.all_reduce(sum).wait();
    EXPECT_TRUE(sum.eq(3.0).all().item<bool>());
  });
}

// A thread that has chosen no device is on device 0, where asking about an event of another one makes a context.
TEST(NcclRanks, OtherThreadsAskWithoutAContextOnAnotherDevice) {
  on_gpus(2, [](comm::Communicator& ranks, at::Device device) {
    const at::Tensor sum = at::ones({1 << 10}, at::TensorOptions(device));
    const comm::Work work = ranks.all_reduce(sum);
    TransferStream copies(device);
    at::Tensor back = at::zeros({1 << 10}, at::TensorOptions());
    work.wait();
    TransferStream::Mark mark = copies.copy(back, sum);
    std::thread([&] {
      TransferStream::wait_on_host(mark);
      while (!work.is_completed()) std::this_thread::yield();
    }).join();
    EXPECT_TRUE(back.eq(2.0).all().item<bool>());
  });
}

// The record of collectives outlives what it records, and the host is ahead of the device.
TEST(NcclRanks, WhatIsRecordedKeepsNoMemory) {
  on_gpus(2, [](comm::Communicator& ranks, at::Device device) {
    const auto recorder = std::make_shared<comm::FlightRecorder>(
        comm::FlightRecorderOptions{.rank = ranks.rank(), .world_size = 2, .host = "test"});
    ranks.observe_with(recorder);
    const at::Tensor own = at::ones({1 << 10}, at::TensorOptions(device));
    const at::Tensor all = at::zeros({2 << 10}, at::TensorOptions(device));
    const comm::Work gather = ranks.all_gather(all, own, "gather");
    gather.wait();
    at::Tensor message = at::full({1 << 10}, 7.0, at::TensorOptions(device));
    const comm::Work sent = ranks.rank() == 0 ? ranks.isend(message, 1) : ranks.irecv(message, 0);
    sent.wait();
    for (const at::Tensor& tensor : {own, all, message}) EXPECT_EQ(tensor.storage().use_count(), 1);
    EXPECT_EQ(recorder->log().entries.size(), 2);
    EXPECT_EQ(all.sum().item<float>(), 2 << 10);
    for (int asked = 0; !gather.is_completed() || !sent.is_completed(); ++asked) ASSERT_LT(asked, 100'000);
    recorder->beat();
    for (const comm::FlightEntry& entry : recorder->log().entries) EXPECT_EQ(entry.state, comm::FlightState::kFinished);
  });
}

struct NcclCell {
  std::string name;
  ordered_json config;
  int world = 2;
  double tolerance = 1e-4;
};

ordered_json with_zero(ordered_json config, const std::string& key, const ordered_json& value) {
  config["zero_optimization"][key] = value;
  return config;
}

void add_precisions(std::vector<NcclCell>& cells) {
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    for (const int stage : {0, 1, 2, 3}) {
      const ordered_json plain = device_config(stage, precision);
      const double tolerance = tolerance_of(precision);
      cells.push_back({cat("Stage", stage, precision), plain, 2, tolerance});
      if (stage == 0) continue;
      cells.push_back({cat("OptimizerOnTheHostStage", stage, precision), with_offload(plain, on_host()), 2, tolerance});
    }
  }
}

void add_offloads(std::vector<NcclCell>& cells) {
  for (const int stage : {1, 2, 3}) {
    const ordered_json plain = device_config(stage, "bf16");
    cells.push_back(
        {cat("UpdatedInBackwardStage", stage), with_offload(plain, on_host({{"super_offload", true}})), 2, 0.05});
    cells.push_back({cat("HalfOnTheHostStage", stage), with_offload(plain, on_host({{"ratio", 0.5}})), 2, 0.05});
  }
  const ordered_json stage3 = device_config(3, "bf16");
  cells.push_back({"AllOnTheHost", with_offload(stage3, on_host(), on_host()), 3, 0.05});
  const ordered_json in_files = on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}});
  cells.push_back({"AllInFiles", with_offload(stage3, on_disk(), in_files), 2, 0.05});
}

void add_groups(std::vector<NcclCell>& cells) {
  const ordered_json stage3 = device_config(3, "fp32");
  cells.push_back({"ThreeRanksStage2", device_config(2, "fp32"), 3});
  cells.push_back({"ThreeRanksStage3", stage3, 3});
  cells.push_back({"Mics", with_zero(stage3, "mics_shard_size", 2), 4});
  cells.push_back({"SecondaryShards", with_zero(stage3, "zero_hpz_partition_size", 2), 4});
  cells.push_back({"QuantizedWeights", with_zero(stage3, "zero_quantized_weights", true), 2, 0.05});
  cells.push_back({"QuantizedGradients", with_zero(stage3, "zero_quantized_gradients", true), 2, 0.2});
  for (const char* method : {"fp16", "bf16", "int8", "top_k", "power_sgd"}) {
    ordered_json config = device_config(2, "fp32");
    config["gradient_compression"] = {{"method", method}};
    cells.push_back({cat("Compressed_", method), config, 2, 0.05});
  }
}

std::vector<NcclCell> nccl_cells() {
  std::vector<NcclCell> cells;
  add_precisions(cells);
  add_offloads(cells);
  add_groups(cells);
  return cells;
}

class NcclTraining : public ::testing::TestWithParam<NcclCell> {};

INSTANTIATE_TEST_SUITE_P(Grid, NcclTraining, ::testing::ValuesIn(nccl_cells()),
                         [](const auto& cell) { return cell.param.name; });

TEST_P(NcclTraining, DoesWhatTheCpuDoes) {
  const NcclCell& cell = GetParam();
  ordered_json plain = cell.config;
  plain["zero_optimization"].erase("offload_optimizer");
  plain["zero_optimization"].erase("offload_param");
  std::vector<DeviceRun> expected(static_cast<size_t>(cell.world));
  test::run_ranks(cell.world, [&](comm::Communicator& ranks) {
    expected[static_cast<size_t>(ranks.rank())] = train_on(at::kCPU, plain, ranks);
  });
  on_gpus(cell.world, [&](comm::Communicator& ranks, at::Device device) {
    const DeviceRun found = train_on(device, cell.config, ranks);
    expect_same_losses(found.losses, expected[static_cast<size_t>(ranks.rank())].losses, cell.tolerance);
    expect_changed_weights(found);
  });
}

// Layers of one size.
struct TwinNetImpl : torch::nn::Module {
  TwinNetImpl() {
    const torch::nn::LinearOptions options = torch::nn::LinearOptions(6, 6).bias(false);
    one = register_module("one", torch::nn::Linear(options));
    other = register_module("other", torch::nn::Linear(options));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return other(torch::tanh(one(x.to(one->weight.scalar_type())))); }

  torch::nn::Linear one{nullptr};
  torch::nn::Linear other{nullptr};
};
TORCH_MODULE(TwinNet);

// All_gathers of one size go together whatever they are of: each rank computes with the other's layer.
TEST(NcclGathers, OfOtherParametersAreAnErrorOfTheNextStep) {
  on_gpus(2, [](comm::Communicator& ranks, at::Device device) {
    TwinNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = device_config(3, "bf16"),
                                    .communicator = borrowed(ranks),
                                    .device = device.str()})
                            .engine;
    const auto step = [&](int64_t number) {
      for (int64_t micro = 0; micro < 2; ++micro) {
        engine->backward(model->forward(sample(2 * number + micro, ranks.rank()).to(device)).pow(2).mean());
        engine->step();
      }
    };
    for (int64_t number = 0; number < 3; ++number) step(number);
    {
      const torch::NoGradGuard no_grad;
      const at::Tensor x = sample(0, 0).to(device).to(model->one->weight.scalar_type());
      engine->eval();
      ranks.rank() == 0 ? model->one(x) : model->other(x);
      ranks.rank() == 0 ? model->other(x) : model->one(x);
      engine->train();
    }
    step(3);
    EXPECT_THAT([&] { step(4); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("have run different operators at stage 3"),
                                                                  HasSubstr("rank 1: step 4"))));
  });
}

// Two micro-batches a step: what ranks gathered is compared in step().
TEST(NcclGathers, RanksMeetOnceAStep) {
  on_gpus(2, [](comm::Communicator& ranks, at::Device device) {
    const auto recorder = std::make_shared<comm::FlightRecorder>(
        comm::FlightRecorderOptions{.rank = ranks.rank(), .world_size = 2, .host = "test"});
    ranks.observe_with(recorder);
    train_on(device, device_config(3, "bf16"), ranks);
    int meetings = 0;
    int steps = 0;
    for (const comm::FlightEntry& entry : recorder->log().entries) {
      meetings += entry.label.text() == "start of backward" ? 1 : 0;
      steps += entry.label.text() == "gradient norm" ? 1 : 0;
      EXPECT_NE(entry.label.text(), "end of backward");
    }
    EXPECT_GT(steps, 1);
    EXPECT_LE(std::abs(meetings - steps), 1) << meetings << " of " << steps << " steps";
  });
}

// NCCL's averages are slower; sums of float16 may be too large.
TEST(NcclReductions, AreSumsThatRanksDivideButInFloat16) {
  for (const auto& [precision, expected] : {std::pair{"bf16", "sum"}, {"fp32", "sum"}, {"fp16", "avg"}}) {
    on_gpus(2, [&, precision = precision, expected = expected](comm::Communicator& ranks, at::Device device) {
      const auto recorder = std::make_shared<comm::FlightRecorder>(
          comm::FlightRecorderOptions{.rank = ranks.rank(), .world_size = 2, .host = "test"});
      ranks.observe_with(recorder);
      train_on(device, device_config(2, precision), ranks);
      int reductions = 0;
      for (const comm::FlightEntry& entry : recorder->log().entries) {
        if (!entry.label.text().starts_with("gradients of bucket")) continue;
        EXPECT_EQ(entry.reduction.text(), expected) << precision;
        ++reductions;
      }
      EXPECT_GT(reductions, 0);
    });
  }
}

}  // namespace
}  // namespace ds::engine
