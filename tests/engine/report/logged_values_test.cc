// Values of a program in the monitors, and the engine's own beside them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/errors.h"
#include "dsengine/monitor.h"
#include "tests/model/small_run.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using profiling::Event;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::ThrowsMessage;

constexpr int64_t kSamplesOfStep = 16;  // micro-batches of 4, two of them, two ranks

using Curves = std::map<std::string, std::vector<std::pair<int64_t, double>>>;

// A monitor of a program's own.
class Kept : public profiling::Monitor {
 public:
  explicit Kept(Curves& curves) : curves_(curves) {}
  void write_events(const std::vector<Event>& events) override {
    for (const Event& event : events) curves_[event.name].emplace_back(event.step, event.value);
  }

 private:
  Curves& curves_;
};

std::shared_ptr<Engine> kept_engine(SmallNet& model, nlohmann::ordered_json config, comm::Communicator& ranks,
                                    Curves& curves) {
  auto engine = start(model.ptr(), config, ranks).engine;
  add_monitor(*engine, ranks.rank() == 0 ? std::make_unique<Kept>(curves) : nullptr);
  return engine;
}

nlohmann::ordered_json logging_config() {
  nlohmann::ordered_json config = small_config(/*stage=*/1, /*accumulation=*/2);
  config["steps_per_print"] = 2;
  return config;
}

TEST(LoggedValues, AreJoinedOverCallsAndRanksAndWrittenLater) {
  Curves curves;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = kept_engine(model, logging_config(), ranks, curves);
    for (int step = 1; step <= 3; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        const double value = 10 * step + 2 * micro + ranks.rank();
        at::Tensor changed = torch::full({1}, value, torch::kFloat);
        engine->log("mean", changed, {.sync_dist = true});
        changed.fill_(-1);
        engine->log("sum", value, {.sync_dist = true, .reduce = Reduce::kSum});
        engine->log("min", value, {.sync_dist = true, .reduce = Reduce::kMin});
        engine->log("max", static_cast<int>(value), {.sync_dist = true, .reduce = Reduce::kMax});
        engine->log("epoch", torch::tensor(static_cast<int64_t>(value)), {.sync_dist = true, .on_epoch = true});
        if (ranks.rank() == 0) engine->log("own", value);
        engine->backward(model->loss(sample(2 * step + micro, ranks.rank())));
        engine->step();
      }
      if (ranks.rank() == 0) EXPECT_EQ(curves["mean"].size(), step < 2 ? 0U : 2U);
    }
    engine->log("evaluated", 4.0 + ranks.rank(), {.sync_dist = true});
    end_epoch(*engine);
  });
  const auto at_steps = [](double first, double growth) {
    return ElementsAre(Pair(kSamplesOfStep, first), Pair(2 * kSamplesOfStep, first + growth),
                       Pair(3 * kSamplesOfStep, first + 2 * growth));
  };
  EXPECT_THAT(curves["mean"], at_steps(11.5, 10));
  EXPECT_THAT(curves["sum"], at_steps(46, 40));
  EXPECT_THAT(curves["min"], at_steps(10, 10));
  EXPECT_THAT(curves["max"], at_steps(13, 10));
  EXPECT_THAT(curves["own"], at_steps(11, 10));
  EXPECT_THAT(curves["epoch"], ElementsAre(Pair(3 * kSamplesOfStep, 21.5)));
  EXPECT_THAT(curves["evaluated"], ElementsAre(Pair(3 * kSamplesOfStep, 4.5)));
}

TEST(LoggedValues, OneCollectiveTakesAllOfThem) {
  Curves curves;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = kept_engine(model, logging_config(), ranks, curves);
    const auto gathers = [&] {
      return engine->communicator().counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllGather)];
    };
    end_epoch(*engine);  // without values
    const int64_t before = gathers();
    for (const char* name : {"a", "b", "c", "d"}) engine->log(name, 1.0, {.sync_dist = true});
    end_epoch(*engine);
    EXPECT_EQ(gathers(), before + 1);
  });
  EXPECT_EQ(curves.size(), 4U);
}

TEST(LoggedValues, RanksThatLogOtherNamesAreToldBothLists) {
  Curves curves;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = kept_engine(model, logging_config(), ranks, curves);
    engine->log("loss", 1.0, {.sync_dist = true});
    if (ranks.rank() == 1) engine->log("accuracy", 1.0, {.sync_dist = true, .reduce = Reduce::kMax});
    EXPECT_THAT([&] { end_epoch(*engine); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("Rank 0: loss (sync_dist, mean) at 0. Rank 1: loss "),
                                                HasSubstr("; accuracy (sync_dist, max) at 0."))));
    end_epoch(*engine);  // goes on
  });
}

TEST(LoggedValues, RefuseWhatIsNoCurve) {
  Curves curves;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = kept_engine(model, logging_config(), ranks, curves);
    const auto refused = [&](const auto& call, const char* text) {
      EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(text)));
    };
    refused([&] { engine->log("", 1.0); }, "expected a name");
    refused([&] { engine->log("Train/Samples/lr", 1.0); }, "found one that the engine writes itself");
    refused([&] { engine->log("a", torch::ones({2})); }, "expected one real number");
    engine->log("a", 1.0);
    refused([&] { engine->log("a", 1.0, {.reduce = Reduce::kMax}); }, "of the calls before, (mean), found (max)");
    refused([&] { add_monitor(*engine, nullptr); }, "expected a monitor on rank 0");
    end_epoch(*engine);
    const auto unseen = start(SmallNet().ptr(), logging_config(), ranks).engine;
    unseen->log("a", torch::ones({}));  // no monitor: no value is kept
    end_epoch(*unseen);
  });
  EXPECT_THAT(curves, ElementsAre(Pair("a", ElementsAre(Pair(0, 1.0)))));
}

TEST(LoggedValues, AMonitorThatIsNullOnRankZeroIsAnError) {
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logging_config(), ranks).engine;
    EXPECT_THAT([&] { add_monitor(*engine, nullptr); }, ThrowsMessage<UsageError>(HasSubstr("found null")));
  });
}

constexpr double kPeak = 1e9;  // operations a second

Curves curves_of_run(const nlohmann::ordered_json& config, bool counts_tokens = false) {
  Curves curves;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = kept_engine(model, config, ranks, curves);
    for (int64_t micro = 0; micro < 8; ++micro) {
      const at::Tensor loss = model->loss(sample(micro, ranks.rank()));
      if (counts_tokens) {
        engine->backward_mean(loss * 3, 3 + ranks.rank());
      } else {
        engine->backward(loss);
      }
      engine->step();
    }
  });
  return curves;
}

// The last point of each of two curves, as a ratio.
double ratio(const Curves& curves, const std::string& name, const std::string& other) {
  return curves.at("Train/Samples/" + name).back().second / curves.at("Train/Samples/" + other).back().second;
}

TEST(OwnValues, HaveRatesOfWhatIsGiven) {
  nlohmann::ordered_json config = logging_config();
  config["gradient_clipping"] = 1.0;
  config["metrics"] = {{"mfu", true},
                       {"peak_tflops", kPeak / 1e12},
                       {"flops_per_sample", 1200},
                       {"causal_flops_per_sample", 1000},
                       {"tokens_per_sample", 7}};
  const Curves curves = curves_of_run(config);
  for (const char* name : {"train_loss", "lr", "grad_norm", "resident_bytes"}) {
    EXPECT_EQ(curves.at(std::string("Train/Samples/") + name).size(), 4U) << name;
  }
  EXPECT_EQ(curves.at("Train/Samples/samples_per_second").size(), 2U) << "the first two steps warm up";
  EXPECT_DOUBLE_EQ(ratio(curves, "tokens_per_second", "samples_per_second"), 7);
  EXPECT_NEAR(ratio(curves, "mfu", "samples_per_second"), 1200 / (2 * kPeak), 1e-15) << "of two devices";
  EXPECT_NEAR(ratio(curves, "mfu_causal", "mfu"), 1000.0 / 1200, 1e-12);
}

TEST(OwnValues, CountOperationsAndTokens) {
  nlohmann::ordered_json config = logging_config();
  config["flops_profiler"] = {{"enabled", true}};
  config["metrics"] = {{"mfu", true}, {"peak_tflops", kPeak / 1e12}};
  const Curves curves = curves_of_run(config, /*counts_tokens=*/true);
  // Two layers forward; their weights' gradients, and the second one's input's.
  const double of_sample = 2.0 * (6 * 11 + 11 * 3 + 6 * 11 + 2 * 11 * 3);
  EXPECT_NEAR(ratio(curves, "mfu", "samples_per_second"), of_sample / (2 * kPeak), 1e-12);
  EXPECT_NEAR(ratio(curves, "mfu_causal", "mfu"), 1, 1e-12) << "there is no attention";
  EXPECT_NEAR(ratio(curves, "tokens_per_second", "samples_per_second"), 14.0 / kSamplesOfStep, 1e-12);
}

TEST(OwnValues, AreInAllFilesOfTheSectionMetrics) {
  const test::ScratchFolder folder;
  nlohmann::ordered_json config = logging_config();
  for (const char* kind : {"json_lines", "openmetrics", "mlflow"}) {
    config["metrics"][kind] = {
        {"enabled", true}, {"output_path", (folder.path() / kind).string()}, {"job_name", "run"}};
  }
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    engine->log("one", 1.0, {.sync_dist = true});
    train(*engine, model, 2);
  });
  EXPECT_THAT(test::file_text(folder.path() / "json_lines/run/metrics.jsonl"),
              AllOf(HasSubstr(R"("Train/Samples/lr":0.02)"), HasSubstr(R"("one":1.0)")));
  EXPECT_THAT(
      test::file_text(folder.path() / "openmetrics/run.prom"),
      AllOf(HasSubstr("dsengine_train_samples_lr{job=\"run\",name=\"Train/Samples/lr\"} 0.02\n"),
            HasSubstr("dsengine_one{job=\"run\",name=\"one\"} 1\n"), HasSubstr("dsengine_samples{job=\"run\"} 32\n")));
}

TEST(OwnValues, MfuWithoutOperationsIsAConfigError) {
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    nlohmann::ordered_json config = logging_config();
    config["metrics"] = {{"mfu", true}};
    EXPECT_THAT([&] { start(SmallNet().ptr(), config, ranks); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("metrics.mfu"), HasSubstr("flops_per_sample"))));
  });
}

}  // namespace
}  // namespace ds::engine
