// SyncBatchNorm on a tensor axis: statistics over the data ranks, once each, though others compute the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dsengine/errors.h"
#include "dsengine/sync_batch_norm.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine::batch_norm_splits {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kSamples[] = {3, 5};  // of the data ranks
constexpr int kSteps = 4;

// The norm stands where a row split has joined its outputs, or where a column split has cut them.
struct SplitNetImpl : torch::nn::Module {
  explicit SplitNetImpl(bool norm_between) : between(norm_between) {
    // No bias before the norm: its gradient is none but rounding, of which AdamW makes steps.
    wide = register_module("wide", torch::nn::Linear(torch::nn::LinearOptions(6, 8).bias(!between)));
    narrow = register_module("narrow", torch::nn::Linear(torch::nn::LinearOptions(8, 6).bias(between)));
    norm = register_module("norm", torch::nn::BatchNorm1d(between ? 8 : 6));
    last = register_module("last", torch::nn::Linear(6, 3));
    to(torch::kDouble);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = wide(x);
    return last(between ? narrow(torch::tanh(norm(h))) : torch::tanh(norm(narrow(torch::tanh(h)))));
  }
  bool between;
  torch::nn::Linear wide{nullptr}, narrow{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(SplitNet);

at::Tensor samples(int64_t micro_batch) {
  const at::Tensor steps = torch::arange(8 * 6, torch::kDouble) * 1.3 + static_cast<double>(31 * micro_batch);
  return (torch::cos(steps) + torch::sin(steps * steps)).view({8, 6});
}

at::Tensor part_of(const at::Tensor& whole, int data_rank) {
  return whole.narrow(0, data_rank == 0 ? 0 : kSamples[0], kSamples[data_rank]);
}

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& x) {
  return (scores - x.narrow(1, 0, 3) * 2.0).pow(2).mean();
}

struct Trained {
  State parameters, buffers;
};

Trained with_torch(bool between, int accumulation) {
  SplitNet model(between);
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int64_t step = 0; step < kSteps; ++step) {
    adamw.zero_grad();
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      const at::Tensor x = samples(micro);
      const at::Tensor scores = model->forward(x);
      const at::Tensor sum = loss_of(part_of(scores, 0), part_of(x, 0)) + loss_of(part_of(scores, 1), part_of(x, 1));
      (sum / (2.0 * accumulation)).backward();
    }
    adamw.step();
  }
  return {parameters_of(*model), buffers_of(*model)};
}

ordered_json split_config(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["sync_batchnorm"] = true;
  config["tensor_parallel"] = {{"autotp_size", 2}};
  return config;
}

Initialized start_split(const SplitNet& model, const ordered_json& config, comm::Communicator& ranks) {
  return initialize({.model = model.ptr(),
                     .config = config,
                     .split = {{.pattern = "wide"}, {.pattern = "narrow", .style = parallel::Style::kRow}},
                     .communicator = borrowed(ranks)});
}

void train_split(Engine& engine, SplitNet& model, int micro_batches) {
  const int data_rank = engine.communicator().rank();
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    const at::Tensor x = part_of(samples(micro), data_rank);
    engine.backward(loss_of(model->forward(x), x));
    engine.step();
  }
}

class SyncBatchNormOnATensorAxis : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, SyncBatchNormOnATensorAxis, ::testing::Values(0, 1, 2, 3));

TEST_P(SyncBatchNormOnATensorAxis, BehindARowSplitCountsEachDataRankOnce) {
  for (const int accumulation : {1, 2}) {
    const Trained expected = with_torch(/*between=*/false, accumulation);
    test::run_ranks(4, [&](comm::Communicator& ranks) {
      SplitNet model(/*norm_between=*/false);
      const auto engine = start_split(model, split_config(GetParam(), accumulation), ranks).engine;
      ASSERT_EQ(engine->communicator().size(), 2);
      train_split(*engine, model, kSteps * accumulation);
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.parameters), 1e-9);
      EXPECT_LT(largest_difference(buffers_of(*model), expected.buffers), 1e-9);
    });
  }
}

TEST_P(SyncBatchNormOnATensorAxis, OfChannelsThatAreCut) {
  const Trained expected = with_torch(/*between=*/true, 1);
  test::run_ranks(4, [&](comm::Communicator& ranks) {
    SplitNet model(/*norm_between=*/true);
    const auto engine = start_split(model, split_config(GetParam(), 1), ranks).engine;
    train_split(*engine, model, kSteps);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.parameters), 1e-9);
    EXPECT_LT(largest_difference(buffers_of(*model), expected.buffers), 1e-9);
  });
}

}  // namespace
}  // namespace ds::engine::batch_norm_splits
