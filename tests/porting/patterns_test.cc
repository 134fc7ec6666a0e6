// The programs of docs/patterns.md, beside their plain loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "dsengine/collectives.h"
#include "tests/core/page.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine::patterns {
namespace {

using Model = SmallNet;
using torch::nn::functional::cross_entropy;

constexpr int kPatternRanks = 2;
constexpr int kPatternSteps = 3;

Model make_model() { return Model(); }

torch::optim::AdamW plain_adamw(const std::vector<at::Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
}

class Patterns : public ::testing::TestWithParam<int> {};

// --- a loss per token ------------------------------------------------------------------------------------------------

struct Batch {
  at::Tensor data;
  at::Tensor valid;  // 1 for each row that counts, else 0
};

Batch padded_batch(int step, int rank) {
  return {.data = sample(step, rank), .valid = torch::arange(4).lt((step + 3 * rank) % 5).to(torch::kFloat)};
}

at::Tensor losses_of(Model& model, const at::Tensor& x) {
  return (model->forward(x) - x.narrow(1, 0, 3).sin()).pow(2).mean(1);
}

TEST_P(Patterns, ALossPerToken) {
  Model plain;
  auto optimizer = plain_adamw(plain->parameters());
  for (int step = 0; step < kPatternSteps; ++step) {
    at::Tensor sum = torch::zeros({});
    at::Tensor count = torch::zeros({});
    for (int rank = 0; rank < kPatternRanks; ++rank) {
      const Batch batch = padded_batch(step, rank);
      sum = sum + (losses_of(plain, batch.data) * batch.valid).sum();
      count = count + batch.valid.sum();
    }
    optimizer.zero_grad();
    (sum / count).backward();
    optimizer.step();
  }
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    Model model = make_model();
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    std::vector<Batch> batches;
    for (int step = 0; step < kPatternSteps; ++step) batches.push_back(padded_batch(step, communicator.rank()));
    for (const Batch& batch : batches) {
      const at::Tensor losses = losses_of(model, batch.data) * batch.valid;  // one a token, 0 for padding
      engine->backward_mean(losses.sum(), batch.valid.sum().item<double>());
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
  });
}

// --- a contrastive loss ----------------------------------------------------------------------------------------------

struct TowersImpl : torch::nn::Module {
  TowersImpl() {
    encoder = register_module("encoder", SmallNet());
    // Without a bias: it would add as much to all scores of a row, so that its gradient were rounding alone.
    target = register_module("target", torch::nn::Linear(torch::nn::LinearOptions(6, 3).bias(false)));
    fill(*this);
  }
  SmallNet encoder{nullptr};
  torch::nn::Linear target{nullptr};
};
TORCH_MODULE(Towers);

TEST_P(Patterns, AContrastiveLossOverAllRanks) {
  Towers plain;
  auto optimizer = plain_adamw(plain->parameters());
  for (int step = 0; step < kPatternSteps; ++step) {
    const at::Tensor all = torch::cat({sample(step, 0), sample(step, 1)});
    optimizer.zero_grad();
    const at::Tensor scores = plain->encoder->forward(all).matmul(plain->target->forward(all).t());
    cross_entropy(scores, torch::arange(all.size(0))).backward();
    optimizer.step();
  }
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    Towers towers;
    const auto engine = start(towers.ptr(), small_config(GetParam(), 1), communicator).engine;
    SmallNet encoder = towers->encoder;
    torch::nn::Linear target = towers->target;
    for (int step = 0; step < kPatternSteps; ++step) {
      const Batch batch = padded_batch(step, communicator.rank());
      const at::Tensor queries = encoder->forward(batch.data);
      const at::Tensor keys = ds::parallel::all_gather(target->forward(batch.data), engine->communicator());
      const int64_t first = engine->communicator().rank() * queries.size(0);
      const at::Tensor own = torch::arange(first, first + queries.size(0));
      engine->backward(cross_entropy(queries.matmul(keys.t()), own));  // the rows of this rank
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
  });
}

// A parameter goes through a collective as any tensor, also where ZeRO stage 3 has released it.
TEST_P(Patterns, ACollectiveOnAParameterItself) {
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    Towers towers;
    const auto engine = start(towers.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor all = ds::parallel::all_gather(towers->target->weight, engine->communicator());
    const at::Tensor rows = ds::parallel::all_gather(towers->target->weight.narrow(0, 0, 1), engine->communicator());
    const Towers fresh;
    EXPECT_TRUE(all.narrow(0, 3, 3).equal(fresh->target->weight));
    EXPECT_TRUE(rows.narrow(0, 1, 1).equal(fresh->target->weight.narrow(0, 0, 1)));
    const double own = communicator.rank() + 1;
    engine->backward((all.sum() + rows.sum()) * own + towers->encoder->loss(sample(0, 0)));
    const at::Tensor gradient = engine->safe_get_full_grad(towers->target->weight);
    EXPECT_TRUE(gradient.allclose(torch::tensor({6.0F, 3.0F, 3.0F}).view({3, 1}).expand({3, 6})))
        << "the sum over ranks of 1 and 2, for each of the two uses of a row: " << gradient;
    engine->step();
  });
}

// --- experts ---------------------------------------------------------------------------------------------------------

constexpr int64_t kExperts = 3;

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int64_t i = 0; i < kExperts; ++i) experts->push_back(torch::nn::Linear(6, 6));
    register_module("experts", experts);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& chosen) {
    at::Tensor mixed = torch::zeros_like(x);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const at::Tensor rows = chosen.eq(expert).nonzero().squeeze(1);  // perhaps none: it runs all the same
      mixed = mixed.index_add(0, rows, (*experts)[expert]->as<torch::nn::Linear>()->forward(x.index_select(0, rows)));
    }
    return mixed;
  }
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Experts);

// Rank 0 uses experts 0 and 1, rank 1 expert 2 alone; in the last step it has no rows at all.
at::Tensor choice_of(int rank) { return rank == 0 ? torch::tensor({0, 1, 0, 1}) : torch::tensor({2, 2, 2, 2}); }
int64_t rows_of(int step, int rank) { return step == kPatternSteps - 1 && rank == 1 ? 0 : 4; }

TEST_P(Patterns, ExpertsThatOneRankDoesNotUse) {
  Experts plain;
  auto optimizer = plain_adamw(plain->parameters());
  const auto sum_of = [](Experts& model, int step, int rank) {
    const int64_t rows = rows_of(step, rank);
    return model->forward(sample(step, rank).narrow(0, 0, rows), choice_of(rank).narrow(0, 0, rows)).pow(2).sum();
  };
  for (int step = 0; step < kPatternSteps; ++step) {
    optimizer.zero_grad();
    const int64_t rows = rows_of(step, 0) + rows_of(step, 1);
    ((sum_of(plain, step, 0) + sum_of(plain, step, 1)) / rows).backward();
    optimizer.step();
  }
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    Experts model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    for (int step = 0; step < kPatternSteps; ++step) {
      const auto rows = static_cast<double>(rows_of(step, communicator.rank()));
      engine->backward_mean(sum_of(model, step, communicator.rank()), rows);
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
  });
}

// --- values from the first batch -------------------------------------------------------------------------------------

struct ActNormImpl : torch::nn::Module {
  ActNormImpl() {
    scale = register_parameter("scale", torch::ones({6}));
    shift = register_parameter("shift", torch::zeros({6}));
    ready = register_buffer("ready", torch::zeros({}, torch::kBool));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!ready.item<bool>()) {
      const at::NoGradGuard no_grad;
      const at::Tensor mean = mean_of_ranks(x.mean(0));
      const at::Tensor square = mean_of_ranks(x.pow(2).mean(0));
      scale.copy_((square - mean.pow(2)).clamp_min(1e-6).rsqrt());
      shift.copy_(-mean);
      ready.fill_(true);
    }
    return (x + shift) * scale;
  }
  at::Tensor scale, shift, ready;
  std::function<at::Tensor(const at::Tensor&)> mean_of_ranks = [](const at::Tensor& own) { return own; };
};
TORCH_MODULE(ActNorm);

TEST_P(Patterns, ValuesFromTheFirstBatch) {
  ActNorm plain;
  auto optimizer = plain_adamw(plain->parameters());
  for (int step = 0; step < kPatternSteps; ++step) {
    optimizer.zero_grad();
    plain->forward(torch::cat({sample(step, 0), sample(step, 1)})).pow(4).mean().backward();
    optimizer.step();
  }
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    ActNorm model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    model->mean_of_ranks = [engine](const at::Tensor& own) { return engine->mean(own); };
    for (int step = 0; step < kPatternSteps; ++step) {
      engine->backward(model->forward(sample(step, communicator.rank())).pow(4).mean());
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-5);
    model->mean_of_ranks = nullptr;  // it holds the engine
  });
}

// --- deciding together -----------------------------------------------------------------------------------------------

TEST_P(Patterns, RanksStopAtTheSameStep) {
  constexpr double kLargestDivergence = 3.0;
  // One rank alone is told to end in step 4; the mean of a metric is too large in step 2.
  for (const bool by_signal : {true, false}) {
    test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
      Model model;
      const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
      for (int step = 0; step < 9; ++step) {
        const bool told_to_end = by_signal && communicator.rank() == 1 && step == 4;
        const at::Tensor divergence = torch::tensor(by_signal ? 0.0 : step * (1.0 + communicator.rank()));
        const bool ends = engine->agree(told_to_end);               // SIGTERM: any rank has been told
        const double kl = engine->mean(divergence).item<double>();  // PPO: one number for all
        const bool enough = kl > kLargestDivergence;                // so that all come to the same answer
        if (ends || enough) break;
        engine->backward(model->loss(sample(step, communicator.rank())));
        engine->step();
      }
      EXPECT_EQ(engine->global_steps(), by_signal ? 4 : 3);
    });
  }
}

// --- an average of the weights ---------------------------------------------------------------------------------------

TEST_P(Patterns, AnAverageOfTheWeights) {
  for (const bool narrow : {false, true}) {
    test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
      Model model;
      const auto config = narrow ? with_bf16(small_config(GetParam(), 1)) : small_config(GetParam(), 1);
      const auto engine = start(model.ptr(), config, communicator).engine;
      State expected = copy_of(engine->fp32_state_dict());
      const std::vector<at::Tensor> parameters = model->parameters();
      std::vector<at::Tensor> averages;
      for (const at::Tensor& parameter : parameters) {
        averages.push_back(engine->safe_get_local_fp32_param(parameter).clone());
      }
      const auto follow = [&](double decay) {  // after each step()
        for (size_t i = 0; i < parameters.size(); ++i) {
          averages[i].lerp_(engine->safe_get_local_fp32_param(parameters[i]), 1.0 - decay);
        }
      };
      const auto swap = [&] {  // the averages for the weights, and back
        for (size_t i = 0; i < parameters.size(); ++i) {
          const at::Tensor own = engine->safe_get_local_fp32_param(parameters[i]).clone();
          engine->safe_set_local_fp32_param(parameters[i], averages[i]);
          averages[i] = own;
        }
      };
      State weights;
      for (int step = 0; step < kPatternSteps; ++step) {
        engine->backward(model->loss(sample(step, communicator.rank())));
        engine->step();
        follow(0.9);
        weights = copy_of(engine->fp32_state_dict());
        for (auto& [name, average] : expected) average = average.lerp(weights.at(name), 0.1);
      }
      swap();
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-6);
      swap();
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), weights), 0.0);
      engine->backward(model->loss(sample(0, communicator.rank())));
      engine->step();
    });
  }
}

// --- a file for plain LibTorch ---------------------------------------------------------------------------------------

TEST_P(Patterns, AFileForPlainLibTorch) {
  const test::ScratchFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  State trained;
  test::run_ranks(kPatternRanks, [&](comm::Communicator& communicator) {
    Model model;
    const auto engine = start(model.ptr(), with_bf16(small_config(GetParam(), 1)), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    const ds::engine::StateDict weights = engine->fp32_state_dict();  // on all ranks
    if (engine->global_rank() == 0) {
      Model plain = make_model();
      const at::NoGradGuard no_grad;
      for (auto& parameter : plain->named_parameters()) {
        for (const auto& [name, values] : weights) {
          if (name == parameter.key()) parameter.value().copy_(values);
        }
      }
      torch::save(plain, "model.pt");
    }
    if (communicator.rank() == 0) trained = copy_of(weights);
  });
  Model loaded;
  torch::load(loaded, "model.pt");
  std::filesystem::current_path(before);
  EXPECT_EQ(largest_difference(parameters_of(*loaded), trained), 0.0);
}

INSTANTIATE_TEST_SUITE_P(Stages, Patterns, ::testing::Values(0, 3), stage_name);

TEST(PatternsPage, EveryProgramOfThePageStandsInThisFile) {
  const ProgramsOfPage found = programs_of_page("docs/patterns.md", "tests/porting/patterns_test.cc");
  EXPECT_THAT(found.missing, ::testing::IsEmpty());
  EXPECT_GE(found.count, 6);
}

}  // namespace
}  // namespace ds::engine::patterns
