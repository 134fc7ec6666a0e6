// engine::parity_check: equal on every layout, and mistakes of a program named with their likely cause.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/collective_observer.h"
#include "core/check.h"
#include "core/parity/parity_names.h"
#include "engine/parity_run.h"
#include "engine/report/batch_tape.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A program with a place for a mistake: `planted(net)` changes the model of the runs on the wanted layout, and
// `loss_of(net, micro_batch, is_layout)` is the loss of each run.
struct Checked {
  ordered_json config;
  std::function<void(SmallNet&)> planted = [](SmallNet&) {};
  std::function<at::Tensor(SmallNet&, int64_t, bool)> loss_of = [](SmallNet& net, int64_t i, bool) {
    return net->loss(sample(i, 0));
  };
  // The program's own optimizer; null: the config's.
  std::function<std::shared_ptr<torch::optim::Optimizer>(SmallNet&, bool)> optimizer_of = nullptr;

  ParityReport on(comm::Communicator& ranks) const {
    int runs = 0;
    return parity_check([&] {
      const bool is_layout = ++runs <= 2;
      SmallNet net;
      if (is_layout) planted(net);
      return ParityProgram{.options = {.model = net.ptr(),
                                       .config = config,
                                       .optimizer = optimizer_of ? optimizer_of(net, is_layout) : nullptr,
                                       .communicator = borrowed(ranks),
                                       .seed_generators = false},
                           .loss = [net, is_layout, this](int64_t i) mutable { return loss_of(net, i, is_layout); }};
    });
  }
};

ordered_json quiet(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["gradient_clipping"] = 0.5;
  return config;
}

TEST(ParityCheck, IsEqualAtEachStageAndPrecision) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const std::string precision : {"", "bf16"}) {
      SCOPED_TRACE(cat("stage ", stage, " ", precision));
      Checked checked{.config = quiet(stage, 2)};
      if (!precision.empty()) checked.config[precision]["enabled"] = true;
      run_ranks(2, [&](comm::Communicator& ranks) {
        const ParityReport report = checked.on(ranks);
        EXPECT_TRUE(report.equal) << report.text;
        EXPECT_THAT(report.text, AllOf(HasSubstr("parity: equal, 2 ranks"), HasSubstr(cat("stage ", stage)),
                                       HasSubstr("3 steps, 6 parameters")));
      });
    }
  }
}

void expect_report(const std::function<Checked(int rank)>& checked, const std::vector<std::string>& parts,
                   int count = 2) {
  run_ranks(count, [&](comm::Communicator& ranks) {
    const ParityReport report = checked(ranks.rank()).on(ranks);
    EXPECT_FALSE(report.equal);
    for (const std::string& part : parts) EXPECT_THAT(report.text, HasSubstr(part));
  });
}

void expect_report(const Checked& checked, const std::vector<std::string>& parts, int count = 2) {
  expect_report([&](int) { return checked; }, parts, count);
}

// Multiplies the gradients of all parameters, or of the one of this name.
std::function<void(SmallNet&)> scaled(double by, const std::string& only = "") {
  return [by, only](SmallNet& net) {
    for (const auto& item : net->named_parameters()) {
      if (!only.empty() && item.key() != only) continue;
      item.value().register_hook([by](const at::Tensor& gradient) { return gradient * by; });
    }
  };
}

TEST(ParityCheck, BoundsComeFromASecondOrder) {
  run_ranks(2, [&](comm::Communicator& ranks) {
    const ParityReport report = Checked{.config = quiet(1, 3)}.on(ranks);
    EXPECT_TRUE(report.equal) << report.text;
    EXPECT_THAT(report.text, HasSubstr("from a second run of the layout with its batches in another order"));
    // 1e-3 of a gradient is far beyond the rounding of this small model, and below the constant of float32.
    const ParityReport wrong = Checked{.config = quiet(1, 3), .planted = scaled(1.001)}.on(ranks);
    EXPECT_FALSE(wrong.equal) << wrong.text;
    EXPECT_THAT(wrong.text, HasSubstr("step 1: the gradient of"));
  });
}

TEST(ParityCheck, WithoutASecondOrderTheDtypeBounds) {
  run_ranks(2, [&](comm::Communicator& ranks) {
    EXPECT_THAT(Checked{.config = quiet(1, 1)}.on(ranks).text,
                AllOf(HasSubstr("0.002, a constant of fp32: a second run is the same to the bit"),
                      HasSubstr("no more than two of them are added up")));
    // The order decides what is trained: each third micro-batch counts more.
    Checked ordered{.config = quiet(1, 3)};
    ordered.loss_of = [calls = std::make_shared<int>(0)](SmallNet& net, int64_t i, bool is_layout) {
      return net->loss(sample(i, 0)) * (is_layout && ++*calls % 3 == 0 ? 2 : 1);
    };
    EXPECT_THAT(ordered.on(ranks).text, HasSubstr("in another order the layout itself trains something else"));
  });
}

TEST(ParityCheck, ALossThatIsDividedTwiceIsNamed) {
  expect_report(Checked{.config = quiet(1, 3), .planted = scaled(1.0 / 3, "last.weight")},
                {"step 1: the gradient of last.weight is 0.333 times (1 / gradient_accumulation_steps)",
                 "divided by gradient_accumulation_steps twice"});
}

TEST(ParityCheck, DataOfOneRankOnAllIsNamed) {
  Checked checked{.config = quiet(2, 1)};
  checked.loss_of = [](SmallNet& net, int64_t i, bool is_layout) {
    return net->loss(sample(is_layout ? i / 2 : i, 0));
  };
  expect_report(checked, {"all data-parallel ranks got the data of one rank"});
}

TEST(ParityCheck, AHookOnOneParameterIsNamed) {
  expect_report(Checked{.config = quiet(0, 1), .planted = scaled(0, "norm.bias")},
                {"step 1: the gradient of norm.bias is 0 times what it should be", "leaves the parameter out"});
}

TEST(ParityCheck, ADoubleReductionIsNamed) {
  expect_report(Checked{.config = quiet(2, 1), .planted = scaled(3)},
                {"(and of 5 more of 6) is 3 times (the data-parallel ranks)",
                 "added up over the ranks where their mean is meant, or are reduced twice"},
                /*count=*/3);
}

TEST(ParityCheck, ATiedWeightThatCountsTwiceIsNamed) {
  expect_report(Checked{.config = quiet(1, 1), .planted = scaled(2, "first.weight")},
                {"the gradient of first.weight is 2 times (twice) what it should be",
                 "a tied weight that is reduced at each of its places"},
                /*count=*/3);
}

// The mean over ranks 0 and 1 of three: what a group that is too small gives.
Checked with_small_group(int rank, const std::string& of) {
  return {.config = quiet(1, 1), .planted = scaled(rank < 2 ? 1.5 : 0, of)};
}

TEST(ParityCheck, AGroupOfTheWrongRanksIsNamed) {
  expect_report([](int rank) { return with_small_group(rank, ""); },
                {"(and of 5 more of 6) is another one, of norm", "goes over the wrong ranks"}, /*count=*/3);
}

TEST(ParityCheck, ExpertsThatAreAveragedOverTheWrongRanksAreNamed) {
  expect_report([](int rank) { return with_small_group(rank, "last.weight"); },
                {"the gradient of last.weight is another one, of norm",
                 "goes over the wrong ranks (parameters of experts that are averaged over a group that is not theirs)"},
                /*count=*/3);
}

TEST(ParityCheck, ABufferThatIsNotTheSameOnAllRanksIsNamed) {
  const auto with_buffer = [](int rank) {
    Checked checked{.config = quiet(1, 1)};
    // After the first step a buffer of rank 1, which the loss adds, is another one.
    checked.loss_of = [rank](SmallNet& net, int64_t i, bool is_layout) {
      return net->loss(sample(i, 0)) + (is_layout && rank == 1 && i > 1 ? 0.3 : 0.0);
    };
    return checked;
  };
  expect_report(with_buffer, {"step 2: the loss is", "buffers that are not the same on all ranks"});
}

TEST(ParityCheck, DropoutFromAGeneratorThatNobodySeedsIsNamed) {
  Checked checked{.config = quiet(1, 1)};
  checked.loss_of = [](SmallNet& net, int64_t i, bool is_layout) {
    const at::Tensor keep = (torch::arange(24) + (is_layout ? 1 : 0)).remainder(3).ne(0).view({4, 6});
    return net->loss(sample(i, 0) * keep);
  };
  expect_report(checked, {"step 1: the loss is", "a generator that initialize() does not seed", "dropout draws other"});
}

TEST(ParityCheck, PaddingThatIsCountedInTheMeanIsNamed) {
  Checked checked{.config = quiet(1, 2)};
  // Each micro-batch is padded to the longest of its rank's, and the mean counts the padding.
  checked.loss_of = [](SmallNet& net, int64_t i, bool is_layout) {
    return net->loss(sample(i, 0)) * (is_layout ? 4.0 / static_cast<double>(5 + i % 3) : 1.0);
  };
  expect_report(checked, {"step 1: the loss is", "padding or empty tokens are counted in the mean"});
}

// Leaves the data-parallel axis out of the gradient norm: all ranks take the squares of one.
class NormOfOneRank final : public comm::CollectiveObserver {
 public:
  int add_group(const std::string& /*name*/, const std::vector<int>& /*ranks*/, int /*own*/) override { return 0; }
  comm::Work observe(int /*group*/, comm::Collective& collective, c10::function_ref<comm::Work()> launch) override {
    if (collective.label == "gradient norm") collective.op = comm::ReduceOp::kMax;
    return launch();
  }
  void phase(const char* /*name*/, int64_t /*step*/, int64_t /*micro_step*/) override {}
};

TEST(ParityCheck, ANormWithoutOneAxisIsNamed) {
  run_ranks(2, [](comm::Communicator& ranks) {
    ranks.observe_with(std::make_shared<NormOfOneRank>());
    const ParityReport report = Checked{.config = quiet(2, 1)}.on(ranks);
    EXPECT_FALSE(report.equal);
    EXPECT_THAT(report.text, AllOf(HasSubstr("step 1: the gradient norm is"), HasSubstr("each gradient agrees"),
                                   HasSubstr("without one axis of the ranks")));
  });
}

// A program that goes on from a file of torch::save(), and on the wanted layout forgets it.
TEST(ParityCheck, AnOptimizerStateThatWasNotLoadedIsNamed) {
  const test::ScratchFolder folder;
  const std::string file = folder.path().string() + "/optimizer.pt";
  const auto made_for = [](SmallNet& net) {
    return std::make_shared<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(0.02));
  };
  {
    SmallNet net;
    const auto optimizer = made_for(net);
    for (int64_t step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      net->loss(sample(step + 100, 0)).backward();
      optimizer->step();
    }
    torch::save(*optimizer, file);
  }
  const auto checked = [&](bool forgets) {
    Checked program{.config = quiet(1, 1)};
    program.optimizer_of = [&, forgets](SmallNet& net, bool is_layout) {
      const auto optimizer = made_for(net);
      if (!is_layout || !forgets) torch::load(*optimizer, file);
      return optimizer;
    };
    return program;
  };
  expect_report(checked(/*forgets=*/true), {"step 1: the gradients agree, and the update of",
                                            "an optimizer state or a step count that was not loaded"});
  run_ranks(2, [&](comm::Communicator& ranks) {
    const ParityReport report = checked(/*forgets=*/false).on(ranks);
    EXPECT_TRUE(report.equal) << report.text;
  });
}

TEST(ParityCheck, BatchesThatAreWrittenDownComeBack) {
  const test::ScratchFolder folder;
  BatchTape writer(folder.path().string(), {.writes_inputs = true, .writes_labels = true});
  const at::Tensor input = torch::arange(6).view({2, 3});
  const at::Tensor label = torch::ones({2}, torch::kBFloat16);
  EXPECT_TRUE(writer.take(input, {.data_rank = 1, .micro_batch = 4}, 0).is_same(input));
  writer.take([&] { return pipeline::MicroBatch{.inputs = {input * 2}, .labels = {label}}; }, {.micro_batch = 5});
  EXPECT_EQ(writer.count(), 3);

  BatchTape reader(folder.path().string(), {.reads = true});
  EXPECT_TRUE(reader.take(torch::zeros({1}), {.data_rank = 1, .micro_batch = 4}, 0).equal(input));
  const auto none = []() -> pipeline::MicroBatch { throw std::logic_error("the program's own batch is not wanted"); };
  const pipeline::MicroBatch batch = reader.take(none, {.micro_batch = 5});
  ASSERT_EQ(batch.inputs.size(), 1);
  EXPECT_TRUE(batch.inputs[0].equal(input * 2));
  ASSERT_EQ(batch.labels.size(), 1);
  EXPECT_TRUE(batch.labels[0].equal(label) && batch.labels[0].scalar_type() == torch::kBFloat16);
  EXPECT_THAT([&] { reader.take(input, {.data_rank = 1, .micro_batch = 4}, 1); },
              ::testing::ThrowsMessage<UsageError>(HasSubstr("which has written 1 of them down, found one more")));
  EXPECT_THAT([&] { reader.take(none, {.micro_batch = 6}); },
              ::testing::ThrowsMessage<UsageError>(HasSubstr("takes more micro-batches than that run has had")));
}

// The samplers of the runs, over 16 samples in two ranks' batches of 2, two in a step.
TEST(ParityCheck, OneRankTakesTheBatchesOfTheRanksInTurn) {
  const test::ScratchFolder folder;
  folder.write(kParityLayoutFile, R"({"data_ranks": 2, "micro_batch": 2, "accumulation": 2, "tensor_ranks": 1, )"
                                  R"("pipe_ranks": 1, "stage": 0, "dtype": "fp32"})");
  config::DsConfig config;
  config.train_micro_batch_size_per_gpu = 2;
  config.gradient_accumulation_steps = 2;
  const auto sampler = [&](const std::string& like, ParityRun::Order order, const SamplerPlace& place) {
    const ParityRun run{.folder = {}, .source = {}, .like = like, .order = order};
    return run.sampler(config, place, 16);
  };
  using Order = ParityRun::Order;
  const std::string like = folder.path().string();
  const SamplerPlace of_first{.rank = 0, .world_size = 2};
  const SamplerPlace of_second{.rank = 1, .world_size = 2};
  const auto first = sampler("", Order::kOwn, of_first);
  const auto second = sampler("", Order::kOwn, of_second);
  const auto one = sampler(like, Order::kOwn, {});
  const auto other = sampler(like, Order::kOtherBatches, of_first);
  const auto reversed = sampler(like, Order::kOtherSamples, of_second);
  const ParityRun of_global{.folder = {}, .source = {}, .like = like, .takes_global_batches = true};
  config::DsConfig on_one_rank = config;
  on_one_rank.train_micro_batch_size_per_gpu = 4;
  const auto global = of_global.sampler(on_one_rank, {}, 16);
  EXPECT_EQ(one->batches_per_epoch(), 8);
  EXPECT_EQ(global->batches_per_epoch(), 4);
  EXPECT_EQ(other->batches_per_epoch(), 4);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int step = 0; step < 2; ++step) {
      std::vector<std::vector<int64_t>> batches;
      for (int i = 0; i < 2; ++i) {
        batches.push_back(first->next_batch());
        batches.push_back(second->next_batch());
      }
      for (const auto& batch : batches) EXPECT_EQ(one->next_batch(), batch);
      for (const size_t first_of_two : {size_t{0}, size_t{2}}) {
        std::vector<int64_t> joined = batches[first_of_two];
        joined.insert(joined.end(), batches[first_of_two + 1].begin(), batches[first_of_two + 1].end());
        EXPECT_EQ(global->next_batch(), joined);
      }
      EXPECT_EQ(other->next_batch(), batches[0]);
      EXPECT_EQ(other->next_batch(), batches[3]);
      for (auto& batch : batches) std::reverse(batch.begin(), batch.end());
      EXPECT_EQ(reversed->next_batch(), batches[1]);
      EXPECT_EQ(reversed->next_batch(), batches[2]);
    }
    for (const auto& each : {first, second, one, other, reversed, global}) EXPECT_TRUE(each->next_batch().empty());
  }
}

TEST(ParityCheck, WhatOneRankCannotRepeatIsRefused) {
  Checked checked{.config = quiet(0, 1)};
  checked.config["sync_batchnorm"] = true;
  run_ranks(1, [&](comm::Communicator& ranks) {
    EXPECT_THAT([&] { checked.on(ranks); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("sync_batchnorm")));
  });
}

}  // namespace
}  // namespace ds::engine
