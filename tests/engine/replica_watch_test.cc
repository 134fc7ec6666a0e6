// The key check_replicas: what ranks should have alike is compared, and a bit that one of them has lost is found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// SmallNet with a frozen table.
struct NetWithTableImpl : torch::nn::Module {
  NetWithTableImpl() {
    net = register_module("net", SmallNet());
    table = register_parameter("table", torch::ones({3, 7}), /*requires_grad=*/false);
  }
  SmallNet net{nullptr};
  at::Tensor table;
};
TORCH_MODULE(NetWithTable);

// Flips a bit that nothing else sees: no version changes.
void flip(const at::Tensor& tensor, size_t bit) {
  static_cast<uint8_t*>(tensor.data_ptr())[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
}

ordered_json watched(int stage, const std::string& precision) {
  ordered_json config = small_config(stage, 1);
  config["check_replicas"] = 1;
  config["zero_optimization"]["reduce_bucket_size"] = 40;
  if (!precision.empty()) config[precision]["enabled"] = true;
  return config;
}

void make_steps(Engine& engine, NetWithTable& model, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    engine.backward(model->net->loss(sample(step, engine.global_rank())));
    engine.step();
  }
}

struct WatchCase {
  int stage;
  int world;
  std::string precision;
};

class ReplicaWatchTest : public ::testing::TestWithParam<WatchCase> {};

INSTANTIATE_TEST_SUITE_P(Layouts, ReplicaWatchTest,
                         ::testing::Values(WatchCase{0, 2, ""}, WatchCase{1, 3, ""}, WatchCase{2, 2, "bf16"},
                                           WatchCase{0, 3, "bf16"}),
                         [](const auto& cell) {
                           return cat("Stage", cell.param.stage, "Ranks", cell.param.world, cell.param.precision);
                         });

// Every parameter, trained or frozen, at a place of it that is drawn.
TEST_P(ReplicaWatchTest, EachFlippedBitIsFoundByName) {
  const auto [stage, world, precision] = GetParam();
  run_ranks(world, [&](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine = start(model.ptr(), watched(stage, precision), ranks).engine;
    make_steps(*engine, model, 0, 3);
    engine->synchronize_parameters();
    ReplicaWatch& watch = *EngineAccess::impl_of(*engine).replicas;
    std::mt19937_64 draws(11);
    for (int i = 0; i < 100; ++i) {
      const auto parameters = model->named_parameters();
      const auto& item = parameters[draws() % parameters.size()];
      const size_t bit = draws() % (8 * item.value().nbytes());
      const bool is_wrong = static_cast<int>(draws() % static_cast<uint64_t>(world)) == ranks.rank();
      if (is_wrong) flip(item.value(), bit);
      EXPECT_THAT([&] { watch.step_made(i + 10); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr(cat("after step ", i + 10)), HasSubstr(item.key()))));
      if (is_wrong) flip(item.value(), bit);
      EXPECT_NO_THROW(watch.step_made(i + 10));
    }
  });
}

TEST(ReplicaWatch, NamesTheOneRankThatDiffersAndStopsTheRun) {
  run_ranks(3, [](comm::Communicator& ranks) {
    NetWithTable model;
    ordered_json config = watched(0, "");
    config["check_replicas"] = 4;
    config["optimizer"]["params"] = {{"lr", 0.0}, {"weight_decay", 0.0}};  // the flipped bit stays as it is
    const auto engine = start(model.ptr(), config, ranks).engine;
    make_steps(*engine, model, 0, 2);
    if (ranks.rank() == 2) flip(model->net->last->weight, 5);
    make_steps(*engine, model, 2, 3);
    EXPECT_THAT([&] { make_steps(*engine, model, 3, 4); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("after step 4"), HasSubstr("of the data-parallel ranks"),
                                                HasSubstr("net.last.weight is on rank 2 another one than on the 2 "),
                                                HasSubstr("Load a checkpoint of an earlier step"))));
    EXPECT_EQ(engine->global_steps(), 4);
    EXPECT_THROW(make_steps(*engine, model, 4, 5), UsageError);  // the model is no longer one
  });
}

TEST(ReplicaWatch, ZeroComparesNothing) {
  run_ranks(2, [](comm::Communicator& ranks) {
    NetWithTable model;
    ordered_json config = watched(0, "");
    config["check_replicas"] = 0;
    const auto engine = start(model.ptr(), config, ranks).engine;
    if (ranks.rank() == 1) flip(model->table, 3);
    EXPECT_NO_THROW(make_steps(*engine, model, 0, 3));
  });
}

TEST(ReplicaWatch, AParameterThatIsNotItsMasterIsFoundOnOneRank) {
  run_ranks(1, [](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine = start(model.ptr(), watched(0, "bf16"), ranks).engine;
    make_steps(*engine, model, 0, 2);
    flip(model->net->first->weight, 4);
    EXPECT_THAT([&] { EngineAccess::impl_of(*engine).replicas->step_made(2); },
                ThrowsMessage<UsageError>(HasSubstr("net.first.weight of rank 0 is not its master, rounded")));
  });
}

TEST(ReplicaWatch, ChecksumsSeeEachBitAndTheOrderOfElements) {
  for (const int64_t elements : {1, 7, 4096, 9001}) {
    const at::Tensor values = torch::arange(elements, torch::kFloat).sin();
    const auto of = [](const at::Tensor& tensor) { return zero::device_checksum_of(tensor).item<int64_t>(); };
    const int64_t before = of(values);
    EXPECT_EQ(of(values.clone()), before);
    for (const size_t bit : {size_t{0}, size_t{31}, 32 * static_cast<size_t>(elements) - 1}) {
      const at::Tensor other = values.clone();
      flip(other, bit);
      EXPECT_NE(of(other), before) << elements << ", " << bit;
    }
    if (elements > 4096) EXPECT_NE(of(values.roll(1)), before);
  }
}

}  // namespace
}  // namespace ds::engine
