// The section comms_logger: what an engine's steps send is what its log counts, at every stage.
#include "dsengine/profiling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <map>
#include <string>

#include "core/check.h"
#include "core/log.h"
#include "dsengine/device_mesh.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/count_of.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int kRanks = 2;

ordered_json logged_config(int stage, const ordered_json& section = {{"enabled", true}}) {
  ordered_json config = small_config(stage, /*accumulation=*/2);
  config["comms_logger"] = section;
  return config;
}

void make_steps(Engine& engine, SmallNet& model, int steps) {
  for (int64_t micro = 0; micro < 2 * steps; ++micro) {
    engine.backward(model->loss(sample(micro, engine.global_rank())));
    engine.step();
  }
  engine.synchronize_parameters();
}

// Of operations of this name.
int64_t count_of(const std::vector<CommsStatistics>& all, const std::string& operation) {
  int64_t count = 0;
  for (const CommsStatistics& one : all) count += one.operation == operation ? one.count : 0;
  return count;
}

// What a bandwidth-optimal algorithm hands to others, as CommCounters counts it: of these operations.
double sent_bytes(const std::vector<CommsStatistics>& all) {
  double sent = 0;
  for (const CommsStatistics& one : all) {
    const auto n = static_cast<double>(one.ranks.size());
    const auto bytes = static_cast<double>(one.count * one.message_bytes);
    if (one.operation == "all_reduce") sent += 2 * bytes * (n - 1) / n;
    if (one.operation == "reduce_scatter" || one.operation == "all_gather") sent += bytes * (n - 1) / n;
  }
  return sent;
}

class CommsLogAtStage : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Each, CommsLogAtStage, ::testing::Values(0, 1, 2, 3));

TEST_P(CommsLogAtStage, CountsAndBytesAreThoseOfTheCounters) {
  test::run_ranks(kRanks, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(GetParam()), ranks).engine;
    EXPECT_THAT(comms_statistics(*engine), IsEmpty()) << "what initialize did is not counted";
    make_steps(*engine, model, 3);
    const auto all = comms_statistics(*engine);
    const auto sent = static_cast<double>(engine->comm_bytes_sent());
    EXPECT_GT(sent, 0);
    EXPECT_NEAR(sent_bytes(all), sent, 1.0);
    for (const CommsStatistics& one : all) {
      EXPECT_EQ(one.ranks.size(), static_cast<size_t>(kRanks));
      EXPECT_GE(one.total_ms, 0) << one.operation;
      EXPECT_EQ(one.busbw_gbps, one.algbw_gbps / 2) << one.operation;
    }
    if (GetParam() == 0) {
      EXPECT_EQ(count_of(all, "reduce_scatter") + count_of(all, "all_gather"), 0);
    } else {
      EXPECT_GT(count_of(all, "reduce_scatter"), 0);
      EXPECT_GT(count_of(all, "all_gather"), 0);
    }
  });
}

// Stage 2: a reduction of each bucket in each of two micro-batches, gathers after each step.
TEST(CommsLog, CountsTheOperationsOfStage2) {
  test::run_ranks(kRanks, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(2), ranks).engine;
    make_steps(*engine, model, 3);
    const auto all = comms_statistics(*engine);
    EXPECT_EQ(count_of(all, "reduce_scatter"), 3 * 2) << "one bucket";
    EXPECT_EQ(count_of(all, "all_gather"), 3);
  });
}

TEST(CommsLog, ProfOpsChooseByNamesOfBothLibraries) {
  const ordered_json section = {
      {"enabled", true}, {"prof_all", false}, {"prof_ops", {"all_gather_into_tensor", "broadcast"}}};
  test::run_ranks(kRanks, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(2, section), ranks).engine;
    make_steps(*engine, model, 2);
    const auto all = comms_statistics(*engine);
    EXPECT_EQ(count_of(all, "all_gather"), 2);
    for (const CommsStatistics& one : all) EXPECT_EQ(one.operation, "all_gather");
  });
}

TEST(CommsLog, DebugNamesBuckets) {
  test::run_ranks(kRanks, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(2, {{"enabled", true}, {"debug", true}}), ranks).engine;
    make_steps(*engine, model, 1);
    bool labelled = false;
    for (const CommsStatistics& one : comms_statistics(*engine)) {
      labelled = labelled || one.operation.starts_with("reduce_scatter | ");
    }
    EXPECT_TRUE(labelled);
  });
}

TEST(CommsLog, SummaryIsRankZeros) {
  test::run_ranks(kRanks, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(2), ranks).engine;
    make_steps(*engine, model, 2);
    const std::string plain = log_summary(*engine);
    const int64_t bytes = engine->comm_bytes_sent();
    const auto before = comms_statistics(*engine);
    const std::string compared = log_summary(*engine, /*show_straggler=*/true);
    EXPECT_GT(engine->comm_bytes_sent(), bytes) << "it asks all ranks";
    EXPECT_EQ(count_of(comms_statistics(*engine), "broadcast"), count_of(before, "broadcast")) << "which is not timed";
    if (ranks.rank() == 0) {
      EXPECT_THAT(plain, AllOf(HasSubstr("reduce_scatter"), HasSubstr("all_gather"), Not(HasSubstr("waited"))));
      EXPECT_THAT(compared, AllOf(HasSubstr("who waited for whom"), HasSubstr("| 1: ")));
    } else {
      EXPECT_EQ(plain + compared, "");
    }
  });
}

// How often the table is in what is logged.
size_t tables_in(const std::string& text) { return test::count_of(text, "Comm. Op"); }

TEST(CommsLog, AnEngineThatEndsLogsTheTableOnceIfNobodyHas) {
  log::set_level("info");
  for (const bool asked : {false, true}) {
    ::testing::internal::CaptureStderr();
    test::run_ranks(kRanks, [&](comm::Communicator& ranks) {
      SmallNet model;
      const auto engine = start(model.ptr(), logged_config(0), ranks).engine;
      make_steps(*engine, model, 1);
      if (asked) log_summary(*engine);
    });
    EXPECT_EQ(tables_in(::testing::internal::GetCapturedStderr()), 1U) << asked;
  }
}

TEST(CommsLog, VerboseIsALineForEachOperationOfRankZero) {
  log::set_level("info");
  ::testing::internal::CaptureStderr();
  std::atomic<int64_t> operations = 0;
  test::run_ranks(kRanks, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), logged_config(2, {{"enabled", true}, {"verbose", true}}), ranks).engine;
    make_steps(*engine, model, 2);
    int64_t own = 0;
    for (const CommsStatistics& one : comms_statistics(*engine)) own += one.count;
    if (ranks.rank() == 0) operations = own;
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  const auto lines = static_cast<int64_t>(test::count_of(text, "rank: 0 | comm op: "));
  EXPECT_EQ(lines, operations);
  EXPECT_GT(lines, 0);
  EXPECT_THAT(text, Not(HasSubstr("rank: 1 | comm op: ")));
}

TEST(CommsLog, IsNotThereWithoutTheSection) {
  test::run_ranks(kRanks, [](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 2), ranks).engine;
    EXPECT_THAT([&] { log_summary(*engine); }, ThrowsMessage<UsageError>(HasSubstr("\"comms_logger\"")));
    EXPECT_THAT([&] { comms_statistics(*engine); }, ThrowsMessage<UsageError>(HasSubstr("comms_statistics")));
  });
}

// A mesh may have made its groups before the engine comes.
TEST(CommsLog, SeesGroupsThatTheProgramHasMadeBefore) {
  test::run_ranks(4, [](comm::Communicator& world) {
    const auto mesh =
        std::make_shared<comm::DeviceMesh>(borrowed(world), comm::MeshLayout(comm::MeshSizes{.data = 2, .tensor = 2}));
    mesh->group({comm::MeshAxis::kData, comm::MeshAxis::kExpert});
    mesh->group(comm::MeshAxis::kTensor);
    SmallNet model;
    const auto engine = initialize({.model = model.ptr(),
                                    .config = logged_config(2),
                                    .split = {{"first", parallel::Style::kColumn}},
                                    .mesh = mesh})
                            .engine;
    for (int64_t micro = 0; micro < 2; ++micro) {
      engine->backward(model->loss(sample(micro, world.rank() / 2)));
      engine->step();
    }
    engine->synchronize_parameters();
    bool of_data = false;
    for (const CommsStatistics& one : comms_statistics(*engine)) {
      if (one.operation != "reduce_scatter") continue;
      of_data = one.ranks == std::vector<int>{world.rank() % 2, world.rank() % 2 + 2};
    }
    EXPECT_TRUE(of_data);
    EXPECT_NO_THROW(log_summary(*engine, /*show_straggler=*/true));
  });
}

}  // namespace
}  // namespace ds::engine
