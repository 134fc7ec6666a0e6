// The programs of docs/from_libtorch.md: every block of C++ on that page stands here, and does what the page says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dsengine/sync_batch_norm.h"
#include "tests/core/page.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using Model = torch::nn::Sequential;
using EnginePointer = std::shared_ptr<Engine>;
using torch::nn::functional::cross_entropy;

constexpr int64_t kSamples = 37;  // no multiple of anything
constexpr int64_t kKinds = 3;

// Pictures of 2 x 3 pixels.
class Images : public torch::data::datasets::Dataset<Images> {
 public:
  torch::data::Example<> get(size_t index) override {
    const at::Tensor steps = torch::arange(6) * 0.9 + static_cast<double>(index);
    return {torch::sin(steps).view({1, 2, 3}), torch::tensor(static_cast<int64_t>(index) % kKinds)};
  }
  std::optional<size_t> size() const override { return kSamples; }
};

Model make_model() {
  Model model(torch::nn::Flatten(), torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, kKinds));
  fill(*model);
  return model;
}

// Relative paths of the page's programs begin in a folder of the test's own.
class DocumentedLoops : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::current_path(folder_.path()); }
  void TearDown() override { std::filesystem::current_path(before_); }

  std::filesystem::path before_ = std::filesystem::current_path();
  test::ScratchFolder folder_;
};

TEST_F(DocumentedLoops, ThreeLinesChange) {
  folder_.write("ds_config.json", small_config(2, 1).dump());
  const auto data_loader = std::make_unique<std::vector<torch::data::Example<>>>();
  for (int step = 0; step < 8; ++step) {
    auto example = Images().get(static_cast<size_t>(step % kKinds));
    data_loader->emplace_back(example.data.unsqueeze(0), example.target.unsqueeze(0));
  }
  std::vector<double> losses;
  const auto loss_of = [&](const at::Tensor& scores, const at::Tensor& kind) {
    const at::Tensor loss = cross_entropy(scores, kind);
    losses.push_back(loss.item<double>());
    return loss;
  };
  Model model = make_model();
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json"});  // the optimizer is in the config
  for (auto& batch : *data_loader) {
    const at::Tensor loss = loss_of(model->forward(batch.data), batch.target);
    engine->backward(loss);  // loss.backward()
    engine->step();          // optimizer.step(), and zero_grad()
  }
  EXPECT_LT(losses[6], losses[0]);
}

// --- data ------------------------------------------------------------------------------------------------------------

// A loss that writes down which kinds it has seen, in order.
auto noting(std::vector<int64_t>& seen) {
  return [&seen](const at::Tensor& scores, const at::Tensor& kinds) {
    for (int64_t i = 0; i < kinds.numel(); ++i) seen.push_back(kinds[i].item<int64_t>());
    return cross_entropy(scores, kinds);
  };
}

template <class Loss>
void train_on_images(const EnginePointer& engine, Model& model, int64_t epochs, const Loss& loss_of) {
  auto images = Images().map(torch::data::transforms::Normalize<>(0.5, 0.25)).map(torch::data::transforms::Stack<>());
  torch::data::samplers::DistributedRandomSampler sampler(*images.size(), engine->dp_world_size(),
                                                          engine->communicator().rank());
  const auto options =
      torch::data::DataLoaderOptions(engine->train_micro_batch_size_per_gpu()).workers(2).drop_last(true);
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);  // else every epoch has the order of the first
    auto batches = torch::data::make_data_loader(images, sampler, options);
    for (auto& batch : *batches) {
      const at::Tensor scores = model->forward(batch.data.to(engine->device()));
      engine->backward(loss_of(scores, batch.target.to(engine->device())));
      engine->step();
    }
  }
}

TEST_F(DocumentedLoops, ADistributedSamplerGivesAllRanksAsManyBatches) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    Model model = make_model();
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    std::vector<int64_t> seen;
    train_on_images(engine, model, 2, noting(seen));
    const int64_t batches = (kSamples + 1) / 2 / 4;  // of a rank in an epoch
    EXPECT_EQ(engine->global_steps(), 2 * batches);
    ASSERT_EQ(seen.size(), static_cast<size_t>(2 * batches * 4));
    const auto second = seen.begin() + batches * 4;
    EXPECT_FALSE(std::equal(seen.begin(), second, second)) << "the second epoch has another order";
  });
}

void train_and_save(const EnginePointer& engine, Model& model, int64_t epochs, int64_t save_every) {
  const auto loss_of = [](const at::Tensor& scores, const at::Tensor& kinds) { return cross_entropy(scores, kinds); };
  auto images = Images().map(torch::data::transforms::Stack<>());
  torch::data::samplers::DistributedRandomSampler sampler(*images.size(), engine->dp_world_size(),
                                                          engine->communicator().rank());
  const int64_t micro_batch = engine->train_micro_batch_size_per_gpu();
  const auto options = torch::data::DataLoaderOptions(micro_batch).drop_last(true);
  const int64_t ranks = engine->dp_world_size();
  const int64_t batches_per_epoch = (kSamples + ranks - 1) / ranks / micro_batch;

  engine->load_checkpoint("checkpoints");  // nothing happens where there is none
  const int64_t batches_done = engine->global_samples() / (micro_batch * ranks);
  int64_t left_out = batches_done % batches_per_epoch;
  for (int64_t epoch = batches_done / batches_per_epoch; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    auto batches = torch::data::make_data_loader(images, sampler, options);
    for (auto& batch : *batches) {
      if (left_out > 0) {
        --left_out;  // trained on before the checkpoint was written
        continue;
      }
      engine->backward(loss_of(model->forward(batch.data), batch.target));
      engine->step();
      if (engine->global_steps() % save_every == 0) engine->save_checkpoint("checkpoints");
    }
  }
}

TEST_F(DocumentedLoops, AnOwnLoaderGoesOnWhereTheCheckpointWasWritten) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto trained = [&](int64_t epochs) {
      Model model = make_model();
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      train_and_save(engine, model, epochs, /*save_every=*/6);  // in the middle of an epoch of 4
      return copy_of(engine->fp32_state_dict());
    };
    trained(2);
    const State resumed = trained(3);
    communicator.barrier();
    if (communicator.rank() == 0) std::filesystem::remove_all("checkpoints");
    communicator.barrier();
    EXPECT_EQ(largest_difference(resumed, trained(3)), 0.0);
  });
}

// --- evaluation ------------------------------------------------------------------------------------------------------

using Batches = std::vector<torch::data::Example<>>;

double accuracy(ds::engine::Engine& engine, Model& model, const Batches& batches) {
  const torch::NoGradGuard no_gradient;
  engine.eval();
  at::Tensor counts = torch::zeros({2}, torch::dtype(torch::kDouble).device(engine.device()));  // right ones, all
  {
    const auto whole = engine.gathered_parameters(model->parameters());  // stage 3: ranks may have fewer batches
    for (const auto& batch : batches) {
      const at::Tensor found = model->forward(batch.data.to(engine.device())).argmax(1);
      counts[0] += found.eq(batch.target.to(engine.device())).sum();
      counts[1] += batch.target.numel();
    }
  }
  engine.communicator().all_reduce(counts).wait();  // the sums over the ranks, in place
  engine.train();
  return (counts[0] / counts[1]).item<double>();
}

Batches batches_of(int64_t begin, int64_t end, int64_t step) {
  Batches batches;
  for (int64_t index = begin; index < end; index += step) {
    auto example = Images().get(static_cast<size_t>(index));
    batches.emplace_back(example.data.unsqueeze(0), example.target.unsqueeze(0));
  }
  return batches;
}

TEST_F(DocumentedLoops, EvaluationAtStage3WithUnevenBatches) {
  for (const int stage : {0, 2, 3}) {
    std::set<double> found;
    std::mutex mutex;
    double alone = 0;
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      Model model = make_model();
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      const double rate = accuracy(*engine, model, batches_of(communicator.rank(), kSamples, 2));
      EXPECT_TRUE(model->is_training());
      const std::lock_guard lock(mutex);
      found.insert(rate);
      if (communicator.rank() == 0) alone = rate;
    });
    Model model = make_model();
    int64_t right = 0;
    for (const auto& batch : batches_of(0, kSamples, 1)) {
      right += model->forward(batch.data).argmax(1).eq(batch.target).sum().item<int64_t>();
    }
    EXPECT_EQ(found.size(), 1U) << "all ranks know it";
    EXPECT_DOUBLE_EQ(alone, static_cast<double>(right) / kSamples) << "stage " << stage;
  }
}

// --- values and gradients --------------------------------------------------------------------------------------------

void save_whole(const EnginePointer& engine, Model& model) {
  {
    const auto whole = engine->gathered_parameters(model->parameters());
    if (engine->global_rank() == 0) torch::save(model, "model.pt");
  }
}

void load_by_one_rank(const EnginePointer& engine, Model& model) {
  {
    const auto whole = engine->gathered_parameters(model->parameters(), /*modifier_rank=*/0);
    if (engine->global_rank() == 0) torch::load(model, "model.pt");
  }
}

TEST_F(DocumentedLoops, AFileOfTorchSaveAtStage3) {
  const State expected = parameters_of(*make_model());
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Model model = make_model();
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    save_whole(engine, model);
    engine->backward(cross_entropy(model->forward(Images().get(1).data.unsqueeze(0)), torch::tensor({1})));
    engine->step();
    EXPECT_GT(largest_difference(copy_of(engine->fp32_state_dict()), expected), 1e-3);
    load_by_one_rank(engine, model);
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), expected), 0.0);
  });
  Model read;
  read = make_model();
  torch::load(read, "model.pt");
  EXPECT_EQ(largest_difference(parameters_of(*read), expected), 0.0);
}

double clipped_step(const EnginePointer& engine, const at::Tensor& loss) {
  engine->backward(loss);
  const double norm = engine->clip_grad_norm_(1.0);  // of the mean gradient of all ranks
  engine->step();
  return norm;
}

void lower_rate(const std::shared_ptr<optimizers::ShardOptimizer>& optimizer) {
  for (auto& group : optimizer->groups()) group.lr *= 0.1;  // from the next step() on
}

TEST_F(DocumentedLoops, ClippingAndRates) {
  const State before = parameters_of(*make_model());
  auto config = small_config(3, 1);
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 1.0}}}};
  config["zero_allow_untested_optimizer"] = true;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Model model = make_model();
    const auto parts = start(model.ptr(), config, communicator);
    const at::Tensor scores = model->forward(Images().get(communicator.rank()).data.unsqueeze(0));
    EXPECT_GT(clipped_step(parts.engine, cross_entropy(scores, torch::tensor({1})) * 100.0), 1.0);
    double squares = 0;
    for (const auto& [name, after] : copy_of(parts.engine->fp32_state_dict())) {
      squares += (after - before.at(name)).pow(2).sum().item<double>();
    }
    EXPECT_NEAR(squares, 1.0, 1e-4) << "SGD with lr 1 went the length of the clipped gradient";
    lower_rate(parts.optimizer);
    ASSERT_EQ(parts.engine->get_lr().size(), 1U);
    EXPECT_DOUBLE_EQ(parts.engine->get_lr()[0], 0.1);
  });
}

TEST_F(DocumentedLoops, RatesThatFollowAValidation) {
  nlohmann::ordered_json config = small_config(2, 1);
  config["scheduler"] = {{"type", "ReduceLROnPlateau"}, {"params", {{"factor", 0.5}, {"patience", 1}}}};
  folder_.write("ds_config.json", config.dump());
  Model model = make_model();
  const auto engine = ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json"}).engine;
  for (const double validation_loss : {3.0, 3.0, 3.0}) {
    engine->backward(model->forward(torch::ones({4, 6})).sum());
    engine->step();
    engine->lr_scheduler()->step(validation_loss);
  }
  EXPECT_DOUBLE_EQ(engine->get_lr()[0], 0.01);
}

// --- an optimizer of the program's own -------------------------------------------------------------------------------

TEST_F(DocumentedLoops, AnOptimizerOfTheProgramsOwnWithItsSchedule) {
  folder_.write("ds_config.json", small_config(2, 1).dump());
  Model model = make_model();
  auto optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(3e-4));
  auto step_lr = std::make_shared<torch::optim::StepLR>(*optimizer, /*step_size=*/1000, /*gamma=*/0.5);
  auto [engine, none, loader, schedule] = ds::engine::initialize(
      {.model = model.ptr(), .config = "ds_config.json", .optimizer = optimizer, .torch_scheduler = step_lr});
  // engine->backward(loss); engine->step();
  const State before = copy_of(engine->fp32_state_dict());
  for (int step = 0; step < 1000; ++step) schedule->step();  // as the engine does
  EXPECT_DOUBLE_EQ(engine->get_lr()[0], 1.5e-4);
  engine->backward(model->forward(torch::ones({4, 6})).sum());
  engine->step();
  EXPECT_GT(largest_difference(before, copy_of(engine->fp32_state_dict())), 0.0);
}

TEST_F(DocumentedLoops, RanksThatEndTogether) {
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(2, 1), ranks).engine;
    int steps = 0;
    while (++steps < 9) {
      const bool terminated = ranks.rank() == 1 && steps == 2;
      const at::Tensor loss = engine->backward(model->loss(sample(steps, ranks.rank())) + 1.0);
      engine->step();
      if (engine->agree(terminated || loss.item<double>() < 0.01)) break;  // after each step, on all ranks
    }
    EXPECT_EQ(steps, 2);
  });
}

TEST_F(DocumentedLoops, AveragedWeights) {
  folder_.write("ds_config.json", small_config(2, 1).dump());
  Model model = make_model();
  const at::Tensor x = torch::ones({4, 6});
  at::Tensor scores;
  const auto train = [&](const EnginePointer& engine, Model& trained) {
    for (int step = 0; step < 3; ++step) {
      engine->backward(trained->forward(x).sum());
      engine->step();
    }
  };
  const auto evaluate = [&](const EnginePointer& engine, Model& averaged) {
    const torch::NoGradGuard no_grad;
    engine->eval();
    scores = averaged->forward(x);
  };
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json", .ema = {.decay = 0.999}});
  train(engine, model);  // step() updates the average
  {
    const ds::engine::EmaScope averaged(engine);  // the model has the averaged weights
    evaluate(engine, model);
  }  // and its own again
  engine->save_16bit_model("out", "ema.safetensors", /*exclude_frozen_parameters=*/false,
                           ds::engine::ema_state_dict(engine));
  EXPECT_FALSE(torch::allclose(model->forward(x), scores));
  Model exported = make_model();
  const auto source = checkpoint::open("out/ema.safetensors");
  checkpoint::load_module(*source, *exported);
  EXPECT_TRUE(torch::allclose(exported->forward(x), scores));
}

// --- several models and buffers --------------------------------------------------------------------------------------

void train_gan(const EnginePointer& generator, const EnginePointer& critic, Model& g, Model& d, const at::Tensor& real,
               const at::Tensor& z) {
  const auto bce = [](const at::Tensor& found, double expected) {
    return torch::binary_cross_entropy_with_logits(found, torch::full_like(found, expected));
  };
  const at::Tensor fake = g->forward(z);
  critic->zero_grad();
  critic->backward(bce(d->forward(real), 1) + bce(d->forward(fake.detach()), 0));
  critic->step();
  generator->backward(bce(d->forward(fake), 1));  // goes through d: its gradients are dropped
  generator->step();
}

TEST_F(DocumentedLoops, TheStandardLoopOfAGan) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    Model g(torch::nn::Linear(2, 6));
    Model d(torch::nn::Linear(6, 1));
    fill(*g);
    fill(*d);
    const auto generator = start(g.ptr(), small_config(2, 1), communicator).engine;
    const auto critic = start(d.ptr(), small_config(2, 1), communicator).engine;
    for (int step = 0; step < 3; ++step) {
      train_gan(generator, critic, g, d, sample(step, communicator.rank()), torch::ones({4, 2}));
    }
    EXPECT_EQ(generator->global_steps(), 3);
    EXPECT_EQ(critic->global_steps(), 3);
    EXPECT_TRUE(critic->was_step_applied());
  });
}

void average_buffers(const EnginePointer& engine, Model& model) {
  for (const at::Tensor& buffer : model->buffers()) {
    if (buffer.is_floating_point()) engine->communicator().all_reduce(buffer, ds::comm::ReduceOp::kAvg).wait();
  }
}

TEST_F(DocumentedLoops, RunningStatisticsOfBatchNormAreMadeEqual) {
  std::vector<at::Tensor> own(2);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Model model(torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 1));
    const auto engine = start(model.ptr(), small_config(0, 1), communicator).engine;
    engine->backward(model->forward(sample(0, communicator.rank())).mean());
    engine->step();
    const auto rank = static_cast<size_t>(communicator.rank());
    own[rank] = model->named_buffers()["0.running_mean"].clone();
    communicator.barrier();
    EXPECT_FALSE(torch::allclose(own[0], own[1])) << "each rank has those of its own batches";
    average_buffers(engine, model);
    EXPECT_TRUE(torch::allclose(model->named_buffers()["0.running_mean"], (own[0] + own[1]) / 2));
  });
}

Model ResNet(int channels) {
  Model model(torch::nn::BatchNorm1d(channels), torch::nn::Linear(channels, 1));
  fill(*model);
  return model;
}

// The page leaves the layers out.
template <class Job>
Model converted(const Job& job) {
  auto model = ResNet(6);
  ds::convert_sync_batchnorm(*model);              // over the ranks of the engine that takes the model
  ds::convert_sync_batchnorm(*model, *job.ranks);  // or, in a loop of one's own, over these
  return model;
}

TEST_F(DocumentedLoops, BatchNormOverAllRanks) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    struct {
      comm::Communicator* ranks;
    } const job{&communicator};
    Model model = converted(job);
    model->forward(sample(0, communicator.rank()));
    const at::Tensor joined = torch::cat({sample(0, 0), sample(0, 1)});
    EXPECT_TRUE(torch::allclose(model->named_buffers()["0.running_mean"], joined.mean(0) * 0.1, 0, 1e-6));
  });
}

// --- the page --------------------------------------------------------------------------------------------------------

TEST(DocumentedPage, EveryProgramOfThePageStandsInThisFile) {
  const ProgramsOfPage found = programs_of_page("docs/from_libtorch.md", "tests/porting/documented_loops_test.cc");
  EXPECT_THAT(found.missing, ::testing::IsEmpty());
  EXPECT_GE(found.count, 8);
}

}  // namespace
}  // namespace ds::engine
