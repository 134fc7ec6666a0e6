// The key check_replicas: what ranks should have alike is compared, and a bit that one of them has lost is found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/count_of.h"
#include "tests/support/flip_bit.h"
#include "tests/support/own_optimizers.h"
#include "tests/support/thread_ranks.h"
#include "zero/partition.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::count_of;
using test::flip_bit;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::optim::AdamParamState;
using torch::optim::LBFGSParamState;

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
  bool copies = false;  // of the model state on two ranks each
  ordered_json offload_optimizer = {};
};

ordered_json config_of(const WatchCase& cell) {
  ordered_json config = with_offload(watched(cell.stage, cell.precision), cell.offload_optimizer);
  if (cell.copies) config["zero_optimization"]["mics_shard_size"] = 2;
  return config;
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What the ranks have alike of the state beside full parameters: on all of them at stage 0, on the first rank of each
// copy where there are copies; by the name that a message has.
NamedTensors replicated_state(const ModelState& state) {
  const bool sliced = state.plan.partition_optimizer;
  NamedTensors result;
  const auto add = [&](const std::string& what, const zero::ParameterBucket& bucket, const at::Tensor& values) {
    const auto segments = sliced ? zero::slice_segments(bucket.layout(), 0) : bucket.layout().segments;
    const Segment& run = segments.front();
    result.emplace_back(cat(what, bucket.parameters().front().name), values.narrow(0, run.slice_offset, run.length));
  };
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = state.buckets[b];
    if (bucket.sharded()) add("", bucket, bucket.kept());
    const bool has_master = state.updates_on_host(b) || state.masters[b].scalar_type() != bucket.options().dtype();
    if (has_master) add(state.updates_on_host(b) ? "the master of " : "", bucket, state.masters[b]);
    for (const auto& [name, values] : state.optimizer.states(b)) {
      add(cat("the optimizer state ", name, " of "), bucket, values);
    }
    if (state.average) add("the moving average of ", bucket, state.average->values(b));
  }
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) add("", bucket, bucket.kept());
  return result;
}

class ReplicaWatchTest : public ::testing::TestWithParam<WatchCase> {};

INSTANTIATE_TEST_SUITE_P(Layouts, ReplicaWatchTest,
                         ::testing::Values(WatchCase{0, 2, ""}, WatchCase{1, 3, ""}, WatchCase{2, 2, "bf16"},
                                           WatchCase{0, 3, "bf16"}, WatchCase{0, 2, "fp16"},
                                           WatchCase{1, 4, "bf16", true}, WatchCase{3, 4, "", true},
                                           WatchCase{3, 4, "bf16", true}, WatchCase{1, 4, "", true, on_host()},
                                           WatchCase{3, 4, "", true, on_host()}),
                         [](const auto& cell) {
                           return cat("Stage", cell.param.stage, "Ranks", cell.param.world, cell.param.precision,
                                      cell.param.copies ? "Copies" : "",
                                      cell.param.offload_optimizer.is_null() ? "" : "OnTheHost");
                         });

// Every parameter, trained or frozen, and what ranks have alike beside it, at a place of it that is drawn.
TEST_P(ReplicaWatchTest, EachFlippedBitIsFoundByName) {
  const WatchCase cell = GetParam();
  const ordered_json config = config_of(cell);
  run_ranks(cell.world, [&](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .ema = {.decay = 0.9}, .communicator = borrowed(ranks)})
            .engine;
    make_steps(*engine, model, 0, 3);
    engine->synchronize_parameters();
    Engine::Impl& impl = EngineAccess::impl_of(*engine);
    NamedTensors replicas;
    if (cell.stage < 3) {
      for (const auto& item : model->named_parameters()) replicas.emplace_back(item.key(), item.value());
    }
    if (cell.stage == 0 || cell.copies) {
      const NamedTensors more = replicated_state(impl.state);
      replicas.insert(replicas.end(), more.begin(), more.end());
      EXPECT_GT(more.size(), 4);
    }
    std::mt19937_64 draws(11);
    for (int i = 0; i < 100; ++i) {
      const auto& [name, values] = replicas[draws() % replicas.size()];
      const size_t bit = draws() % (8 * values.nbytes());
      const auto drawn = draws();
      const bool is_wrong = (cell.copies ? drawn % 2 * 2 : drawn % static_cast<uint64_t>(cell.world)) ==
                            static_cast<uint64_t>(ranks.rank());
      if (is_wrong) flip_bit(values, bit);
      EXPECT_THAT([&] { impl.replicas->step_made(i + 10); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr(cat("after step ", i + 10)), HasSubstr(name))));
      if (is_wrong) flip_bit(values, bit);
      EXPECT_NO_THROW(impl.replicas->step_made(i + 10));
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
    if (ranks.rank() == 2) flip_bit(model->net->last->weight, 5);
    make_steps(*engine, model, 2, 3);
    EXPECT_THAT([&] { make_steps(*engine, model, 3, 4); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("after step 4"), HasSubstr("of the data-parallel ranks"),
                                                HasSubstr("net.last.weight is on rank 2 another one than on the 2 "),
                                                HasSubstr("Load a checkpoint of an earlier step"))));
    EXPECT_EQ(engine->global_steps(), 4);
    EXPECT_THROW(make_steps(*engine, model, 4, 5), UsageError);  // the model is no longer one
  });
}

// Optimizers, precisions and copies, in a comparison after each step.
TEST(ReplicaWatch, ReplicasOfRightRunsAreAlike) {
  constexpr int64_t kSteps = 40;
  struct Layout {
    WatchCase of;
    std::string optimizer = "AdamW";
  };
  for (const Layout& layout : std::vector<Layout>{{{0, 2, ""}},
                                                  {{0, 3, "bf16"}},
                                                  {{0, 2, "fp16"}},
                                                  {{0, 2, ""}, "Lamb"},
                                                  {{0, 2, ""}, "Muon"},
                                                  {{0, 2, "bf16"}, "OneBitAdam"},
                                                  {{0, 2, ""}, "OneBitLamb"},
                                                  {{2, 2, "bf16"}},
                                                  {{1, 4, "", true}},
                                                  {{3, 4, "bf16", true}},
                                                  {{1, 4, "bf16", true, on_host()}},
                                                  {{2, 2, "bf16", false, on_host({{"super_offload", true}})}},
                                                  {{2, 2, "bf16", false, on_host({{"delayed_update", true}})}}}) {
    const auto& [stage, world, precision, copies, offload] = layout.of;
    SCOPED_TRACE(cat("stage ", stage, ", ranks ", world, ", ", precision, ", ", layout.optimizer, copies, offload));
    ordered_json config = config_of(layout.of);
    config["optimizer"] = {{"type", layout.optimizer}, {"params", {{"lr", 0.005}}}};
    const bool compresses = layout.optimizer.starts_with("OneBit");
    if (compresses) config["optimizer"]["params"]["freeze_step"] = kSteps / 4;
    config["zero_allow_untested_optimizer"] = true;
    const bool may_freeze = !compresses && offload.size() < 2;  // others refuse what is frozen later
    run_ranks(world, [&](comm::Communicator& ranks) {
      NetWithTable model;
      const auto engine =
          initialize({.model = model.ptr(), .config = config, .ema = {.decay = 0.9}, .communicator = borrowed(ranks)})
              .engine;
      make_steps(*engine, model, 0, kSteps / 2);
      if (may_freeze) model->net->norm->weight.set_requires_grad(false);
      make_steps(*engine, model, kSteps / 2, kSteps);
      EXPECT_EQ(engine->global_steps(), kSteps);
    });
  }
}

TEST(ReplicaWatch, ZeroComparesNothing) {
  run_ranks(2, [](comm::Communicator& ranks) {
    NetWithTable model;
    ordered_json config = watched(0, "");
    config["check_replicas"] = 0;
    const auto engine = start(model.ptr(), config, ranks).engine;
    if (ranks.rank() == 1) flip_bit(model->table, 3);
    EXPECT_NO_THROW(make_steps(*engine, model, 0, 3));
  });
}

TEST(ReplicaWatch, AParameterThatIsNotItsMasterIsFoundOnOneRank) {
  std::vector<WatchCase> cells = {{0, 1, "bf16"}, {0, 1, "fp16"}};
  for (const int stage : {1, 3}) cells.push_back({stage, 1, "bf16", false, on_host()});
  cells.push_back({2, 1, "fp16", false, on_host({{"super_offload", true}})});
  for (const WatchCase& cell : cells) {
    SCOPED_TRACE(cat("stage ", cell.stage, ", ", cell.precision, ", ", cell.offload_optimizer));
    run_ranks(1, [&](comm::Communicator& ranks) {
      NetWithTable model;
      const auto engine = start(model.ptr(), config_of(cell), ranks).engine;
      make_steps(*engine, model, 0, 2);
      Engine::Impl& impl = EngineAccess::impl_of(*engine);
      const at::Tensor own = impl.state.own_part(0);  // begins with net.first.weight
      flip_bit(own, 4);
      EXPECT_THAT([&] { impl.replicas->step_made(2); },
                  ThrowsMessage<UsageError>(HasSubstr("net.first.weight of rank 0 is not its master, rounded")));
      flip_bit(own, 4);
      // NaNs of other codes are NaN as well.
      impl.state.masters.front()[0].fill_(std::numeric_limits<float>::quiet_NaN());
      own[0].fill_(-std::numeric_limits<float>::quiet_NaN());
      EXPECT_NO_THROW(impl.replicas->step_made(3));
    });
  }
}

TEST(ReplicaWatch, WhatIsInFilesIsLeftAlone) {
  run_ranks(2, [](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine =
        start(model.ptr(), with_offload(watched(3, "bf16"), on_disk(), on_disk({{"max_in_cpu", 0}})), ranks).engine;
    EXPECT_NO_THROW(make_steps(*engine, model, 0, 3));
  });
}

// A state of an optimizer of the program's: of one that steps on slices, and of two on full parameters.
TEST(ReplicaWatch, StatesOfAnOptimizerOfTheProgramAreCompared) {
  constexpr const char* kOnRankOne = " of net.first.weight is on rank 1 another one than on the 2 ranks like rank 0";
  for (const std::string name : {"AdamW", "SignMomentum", "LBFGS"}) {
    SCOPED_TRACE(name);
    run_ranks(3, [&](comm::Communicator& ranks) {
      NetWithTable model;
      const std::vector<at::Tensor> parameters = model->net->parameters();
      std::shared_ptr<torch::optim::Optimizer> optimizer;
      if (name == "AdamW") optimizer = std::make_shared<torch::optim::AdamW>(parameters);
      if (name == "SignMomentum") optimizer = std::make_shared<SignMomentum>(parameters, OwnOptions(0.01));
      if (name == "LBFGS") {
        optimizer = std::make_shared<torch::optim::LBFGS>(parameters, torch::optim::LBFGSOptions(0.1).max_iter(2));
      }
      const InitializeOptions options = {
          .model = model.ptr(), .config = watched(0, ""), .optimizer = optimizer, .communicator = borrowed(ranks)};
      const auto engine = initialize(options).engine;
      const auto closure = [&] {
        at::Tensor loss = model->net->loss(sample(0, ranks.rank()));
        engine->backward(loss);
        return loss;
      };
      for (int i = 0; i < 2; ++i) name == "LBFGS" ? void(engine->step(closure)) : make_steps(*engine, model, i, i + 1);
      Engine::Impl& impl = EngineAccess::impl_of(*engine);
      void* const key = parameters[0].unsafeGetTensorImpl();
      at::Tensor values;
      if (name == "AdamW") values = impl.state.optimizer.states(0).front().second;
      if (name == "SignMomentum") values = static_cast<AdamParamState&>(*optimizer->state().at(key)).exp_avg();
      if (name == "LBFGS") values = static_cast<LBFGSParamState&>(*optimizer->state().at(key)).d();
      if (ranks.rank() == 1) flip_bit(values, 9);
      const std::string state = name == "LBFGS" ? "d" : "exp_avg";
      EXPECT_THAT([&] { impl.replicas->step_made(10); },
                  ThrowsMessage<UsageError>(HasSubstr(cat("the optimizer state ", state, kOnRankOne))));
      if (ranks.rank() == 1) flip_bit(values, 9);
      EXPECT_NO_THROW(impl.replicas->step_made(11));
    });
  }
}

// What a watch says of ranks that say of themselves that they round in different ways. `change` plants a difference on
// one of them.
struct Told {
  std::string log;
  int errors = 0;  // of the ranks
};
Told told_by_ranks_that_round(int stage, const std::vector<std::function<void(NetWithTable&, ModelState&)>>& changes) {
  Told told;
  std::mutex mutex;
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine = start(model.ptr(), watched(stage, ""), ranks).engine;
    make_steps(*engine, model, 0, 2);
    engine->synchronize_parameters();
    Engine::Impl& impl = EngineAccess::impl_of(*engine);
    ReplicaWatch watch(impl.state, impl.order.consistency, /*every=*/1, cat("kind ", ranks.rank()));
    int64_t step = 2;
    for (const auto& change : changes) {
      if (ranks.rank() == 1) change(model, impl.state);
      try {
        watch.step_made(++step);
      } catch (const UsageError&) {
        const std::lock_guard<std::mutex> lock(mutex);
        ++told.errors;
      }
    }
  });
  told.log = ::testing::internal::GetCapturedStderr();
  return told;
}

TEST(ReplicaWatch, ProcessorsOfSeveralKindsPartByRoundingWhichIsAWarningWithItsSize) {
  const auto add = [](double value) {
    return [value](NetWithTable& model, ModelState&) { model->net->last->bias.data()[0].add_(value); };
  };
  const Told told = told_by_ranks_that_round(0, {add(1e-5), add(1e-5), add(1e-2), [](NetWithTable&, ModelState& state) {
                                                   state.optimizer.states(0).front().second[0].add_(1e-4);
                                                 }});
  EXPECT_EQ(told.errors, 0);
  EXPECT_THAT(told.log, HasSubstr("after step 3, of the data-parallel ranks, net.last.bias is not the same on ranks 0 "
                                  "and 1; the largest difference of an element is"));
  EXPECT_THAT(told.log, HasSubstr("the processors of the ranks round in different ways"));
  EXPECT_THAT(told.log, HasSubstr("after step 5, ")) << "it has grown";
  EXPECT_EQ(count_of(told.log, "check_replicas: after step"), 2) << told.log;
}

TEST(ReplicaWatch, WhatIsNoRoundingIsAnErrorOnProcessorsOfSeveralKinds) {
  const auto expect_error = [](int stage, const std::function<void(NetWithTable&)>& change) {
    const auto with_state = [&](NetWithTable& model, ModelState&) { change(model); };
    const Told told = told_by_ranks_that_round(stage, {with_state});
    EXPECT_EQ(told.errors, 2) << told.log;
    EXPECT_EQ(count_of(told.log, "check_replicas: after step"), 0) << told.log;
  };
  const auto not_a_number = [](NetWithTable& model) {
    model->net->last->bias.data()[0].fill_(std::numeric_limits<float>::quiet_NaN());
  };
  expect_error(0, not_a_number);
  expect_error(0, [](NetWithTable& model) { flip_bit(model->table, 0); });              // which nobody updates
  expect_error(1, [](NetWithTable& model) { flip_bit(model->net->last->weight, 0); });  // whose owner has sent it
}

TEST(ReplicaWatch, ThePlanSaysThatRanksRoundInDifferentWays) {
  run_ranks(2, [](comm::Communicator& ranks) {
    NetWithTable model;
    const auto engine = start(model.ptr(), watched(0, ""), ranks).engine;
    Engine::Impl& impl = EngineAccess::impl_of(*engine);
    const auto row_after = [&](const std::string& arithmetic) {
      Plan plan = impl.state.plan;
      ReplicaWatch(impl.state, impl.order.consistency, /*every=*/50, arithmetic).add_row(plan);
      std::string text;
      for (const PlanRow& row : plan.rows) {
        if (row.what == "replicas") text += cat(row.choice, " | ", row.reason);
      }
      return text;
    };
    EXPECT_EQ(row_after({}), "compared after every 1 steps | check_replicas: 1") << "all ranks round alike";
    EXPECT_EQ(row_after(cat("kind ", ranks.rank())),
              "compared after every 50 steps; ranks round in 2 ways, so that differences in what each computes are "
              "warnings | check_replicas: 50; rank 0: kind 0; rank 1: kind 1");
  });
}

// SmallNet with a buffer that follows the last batch.
struct NetWithBufferImpl : torch::nn::Module {
  NetWithBufferImpl() {
    net = register_module("net", SmallNet());
    mean = register_buffer("mean", torch::zeros({6}));
    count = register_buffer("count", torch::zeros({}, torch::kLong));
  }
  at::Tensor loss(const at::Tensor& x) {
    mean.data().copy_(x.mean(0));
    count.data().add_(1);
    return net->loss(x);
  }
  SmallNet net{nullptr};
  at::Tensor mean, count;
};
TORCH_MODULE(NetWithBuffer);

TEST(ReplicaWatch, BuffersThatAreBroadcastAreCompared) {
  ordered_json config = watched(1, "");
  config["broadcast_buffers"] = true;
  run_ranks(2, [&](comm::Communicator& ranks) {
    NetWithBuffer model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    const auto pass = [&](int64_t step) { engine->backward(model->loss(sample(step, ranks.rank()))); };
    for (int64_t step = 0; step < 2; ++step) {
      pass(step);
      engine->step();
    }
    {
      const auto guard = engine->no_sync();  // after which nobody has made the buffers one
      pass(2);
    }
    engine->step();
    pass(3);
    if (ranks.rank() == 1) flip_bit(model->count, 3);
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("after step 4"), HasSubstr("buffer count is not the same on"),
                                                HasSubstr("change buffers in forward, or after step()"))));
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
      flip_bit(other, bit);
      EXPECT_NE(of(other), before) << elements << ", " << bit;
    }
    if (elements > 4096) EXPECT_NE(of(values.roll(1)), before);
    const at::Tensor words = values.view(torch::kInt);
    const auto in_rows = [](const at::Tensor& tensor) { return zero::checksum_in_rows(tensor).item<int64_t>(); };
    EXPECT_EQ(in_rows(words.clone()), in_rows(words));
    EXPECT_NE(in_rows(words.bitwise_xor(torch::arange(elements).eq(elements - 1).to(torch::kInt))), in_rows(words));
  }
}

}  // namespace
}  // namespace ds::engine
