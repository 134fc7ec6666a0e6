// engine::parity_check: equal on every layout, and mistakes of a program named with their likely cause.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A program with a place for a mistake: `loss_of(net, micro_batch)` and `made(net)`, which is called twice.
struct Checked {
  ordered_json config;
  std::function<at::Tensor(SmallNet&, int64_t)> loss_of = [](SmallNet& net, int64_t i) {
    return net->loss(sample(i, 0));
  };
  std::function<void(SmallNet&)> made = [](SmallNet&) {};

  ParityReport on(comm::Communicator& ranks) const {
    return parity_check([&] {
      SmallNet net;
      made(net);
      return ParityProgram{
          .options = {.model = net.ptr(), .config = config, .communicator = borrowed(ranks), .seed_generators = false},
          .loss = [net, this](int64_t i) mutable { return loss_of(net, i); }};
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

void expect_report(const Checked& checked, const std::vector<std::string>& parts) {
  run_ranks(2, [&](comm::Communicator& ranks) {
    const ParityReport report = checked.on(ranks);
    EXPECT_FALSE(report.equal);
    for (const std::string& part : parts) EXPECT_THAT(report.text, HasSubstr(part));
  });
}

TEST(ParityCheck, ALossThatIsDividedTwiceIsNamed) {
  Checked checked{.config = quiet(1, 3)};
  checked.made = [count = std::make_shared<std::atomic<int>>(0)](SmallNet& net) {
    if (count->fetch_add(1) >= 2) return;  // the ranks' models; the third is that of the run on one rank
    net->last->weight.register_hook([](const at::Tensor& gradient) { return gradient / 3; });
  };
  expect_report(checked, {"step 1: the gradient of last.weight is 0.333 times (1 / gradient_accumulation_steps)",
                          "divided by gradient_accumulation_steps twice"});
}

TEST(ParityCheck, DataOfOneRankOnAllIsNamed) {
  const Checked checked{.config = quiet(2, 1)};
  run_ranks(2, [&](comm::Communicator& ranks) {
    Checked own = checked;
    const auto is_layout = std::make_shared<bool>(false);
    own.made = [is_layout](SmallNet&) { *is_layout = !*is_layout; };  // the first model is that of the ranks
    own.loss_of = [is_layout](SmallNet& net, int64_t i) { return net->loss(sample(*is_layout ? i / 2 : i, 0)); };
    const ParityReport report = own.on(ranks);
    EXPECT_FALSE(report.equal);
    EXPECT_THAT(report.text, HasSubstr("all data-parallel ranks got the data of one rank"));
  });
}

TEST(ParityCheck, AHookOnOneParameterIsNamed) {
  Checked checked{.config = quiet(0, 1)};
  checked.made = [count = std::make_shared<std::atomic<int>>(0)](SmallNet& net) {
    if (count->fetch_add(1) >= 2) return;
    net->norm->bias.register_hook([](const at::Tensor& gradient) { return gradient * 0; });
  };
  expect_report(checked,
                {"step 1: the gradient of norm.bias is 0 times what it should be", "leaves the parameter out"});
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
