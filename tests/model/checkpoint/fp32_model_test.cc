// Files that plain LibTorch loads: by torch::load(model, path) into a module that no engine has seen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/export.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/small_run.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Modules without tensors, at several depths, a tied weight, a frozen one, one that is not contiguous, and buffers.
struct ExportedNetImpl : torch::nn::Module {
  ExportedNetImpl() {
    register_module("layers", layers);
    register_module("norm", norm);
    register_module("drop", drop);
    turned = register_parameter("turned", torch::zeros({5, 6}).t().clone());
    frozen = register_parameter("frozen", torch::zeros({6}));
    tied = register_module("tied", std::make_shared<torch::nn::Module>());
    tied->register_parameter("weight", layers[0]->as<torch::nn::Linear>()->weight);
    fill(*this);
    frozen.set_requires_grad(false);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(turned.scalar_type());
    const at::Tensor hidden = norm(layers->forward(typed) + frozen);
    return (torch::matmul(drop(hidden), turned).sum(1) +
            torch::matmul(hidden, tied->named_parameters()["weight"]).sum(1))
        .pow(2)
        .mean();
  }

  torch::nn::Sequential layers{torch::nn::Linear(6, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6)};
  torch::nn::BatchNorm1d norm{6};
  torch::nn::Dropout drop{0.0};
  std::shared_ptr<torch::nn::Module> tied;
  at::Tensor turned, frozen;
};
TORCH_MODULE(ExportedNet);

// A module as plain LibTorch makes and loads it.
State loaded_by_torch(const std::string& path, torch::Dtype dtype = torch::kFloat) {
  ExportedNet fresh;
  if (dtype != torch::kFloat) fresh->to(dtype);  // which converts the count of batches, too
  for (at::Tensor& parameter : fresh->parameters()) parameter.data().fill_(7);
  torch::load(fresh, path);
  EXPECT_FALSE(fresh->frozen.requires_grad());
  EXPECT_TRUE(fresh->turned.requires_grad());
  State state = parameters_of(*fresh);
  for (const auto& item : fresh->named_buffers()) state[item.key()] = item.value().detach().clone();
  fresh->loss(sample(0, 0).to(dtype)).backward();  // it trains as any other
  EXPECT_TRUE(fresh->turned.grad().defined());
  return state;
}

// The masters, under all names, and the buffers as float32 has them.
State expected_of(Engine& engine) {
  State state = copy_of(engine.fp32_state_dict());
  state["tied.weight"] = state.at("layers.0.weight");
  for (const auto& item : engine.module()->named_buffers()) {
    const at::Tensor values = item.value().detach().clone();
    state[item.key()] = values.scalar_type() == torch::kBFloat16 ? values.to(torch::kFloat) : values;
  }
  return state;
}

void expect_bit_equal(const State& found, const State& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(found.contains(name)) << what << ": " << name;
    EXPECT_EQ(found.at(name).scalar_type(), values.scalar_type()) << what << ": " << name;
    EXPECT_TRUE(torch::equal(found.at(name), values)) << what << ": " << name;
  }
}

void train(Engine& engine, ExportedNet& model) {
  for (int64_t step = 0; step < 3; ++step) {
    engine.backward(model->loss(sample(step, engine.global_rank())));
    engine.step();
  }
}

TEST(Fp32Model, TorchLoadsWhatAnEngineOfAnyStageWrites) {
  const test::ScratchFolder folder;
  for (const char* precision : {"fp32", "bf16"}) {
    for (const int stage : {0, 3}) {
      const std::string what = cat(precision, " at stage ", stage);
      const std::string dir = folder / cat(precision, stage);
      State expected;
      run_ranks(2, [&](comm::Communicator& communicator) {
        ExportedNet model;
        ordered_json config = small_config(stage, 1);
        if (precision == std::string("bf16")) config["bf16"] = {{"enabled", true}};
        const auto engine = start(model.ptr(), config, communicator).engine;
        train(*engine, model);
        const std::string path = engine->save_fp32_model(dir + "/file");
        EXPECT_EQ(path, dir + "/file/model.pt");
        engine->save_checkpoint(dir, "tag");
        const State own = expected_of(*engine);
        if (communicator.rank() == 0) expected = own;
      });
      expect_bit_equal(loaded_by_torch(dir + "/file/model.pt"), expected, what);
      // The export that `ds-tool checkpoint convert --format torch` makes.
      const auto source = checkpoint::open(dir + "/tag");
      const auto modules = source->state().empty_modules;
      ASSERT_TRUE(modules.has_value());
      EXPECT_THAT(*modules, ::testing::UnorderedElementsAre("layers.1", "drop"));
      checkpoint::export_module(*source, dir + "/converted.pt", {.widen = true}, *modules);
      expect_bit_equal(loaded_by_torch(dir + "/converted.pt"), expected, what + ", from its checkpoint");
    }
  }
}

TEST(Fp32Model, Float64IsKept) {
  const test::ScratchFolder folder;
  State expected;
  run_ranks(2, [&](comm::Communicator& communicator) {
    ExportedNet model;
    model->to(torch::kDouble);
    const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
    train(*engine, model);
    engine->save_fp32_model(folder.path().string(), "double.pt");
    const State own = expected_of(*engine);
    if (communicator.rank() == 0) expected = own;
  });
  EXPECT_EQ(expected.at("norm.num_batches_tracked").item<int64_t>(), 3);
  expect_bit_equal(loaded_by_torch(folder / "double.pt", torch::kDouble), expected, "float64");
}

// A file that torch::save has written of a model in 16 bits is read in the two ways that docs/from_libtorch.md names.
TEST(HalfModel, OfTorchSaveIsReadInItsDtypeOrConverted) {
  const test::ScratchFolder folder;
  for (const auto& [precision, dtype] : {std::pair("bf16", torch::kBFloat16), {"fp16", torch::kHalf}}) {
    for (const int stage : {0, 3}) {
      const std::string path = folder / cat(precision, stage);
      State expected;
      run_ranks(2, [&, name = precision](comm::Communicator& communicator) {
        SmallNet model;
        ordered_json config = small_config(stage, 1);
        config[name] = {{"enabled", true}};
        const auto engine = start(model.ptr(), config, communicator).engine;
        train(*engine, model, 2);
        const auto whole = engine->gathered_parameters(model->parameters());
        if (communicator.rank() != 0) return;
        torch::save(model, path);
        expected = parameters_of(*model);
      });
      SmallNet wide;
      EXPECT_THAT([&] { torch::load(wide, path); },
                  ThrowsMessage<c10::Error>(HasSubstr("out of bounds for storage of size")));
      SmallNet narrow;
      narrow->to(dtype);
      torch::load(narrow, path);
      expect_bit_equal(parameters_of(*narrow), expected, path);
      SmallNet converted;
      checkpoint::load_module(*checkpoint::open_weights(path), *converted);
      EXPECT_EQ(converted->last->weight.scalar_type(), torch::kFloat);
      EXPECT_EQ(largest_difference(parameters_of(*converted), expected), 0.0) << path;
    }
  }
}

TEST(Fp32Model, AFileThatCannotBeWrittenIsAnErrorOnEveryRank) {
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& communicator) {
    ExportedNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    const std::string path = engine->save_fp32_model(folder.path().string());
    communicator.barrier();
    const std::string before = test::file_text(path);
    EXPECT_THROW(engine->save_fp32_model("/proc/self/no"), IoError);
    EXPECT_THROW(engine->save_fp32_model(path), IoError) << "a file for a folder";
    EXPECT_EQ(test::file_text(path), before);
    EXPECT_TRUE(engine->save_fp32_model(folder.path().string(), "again.pt").ends_with("again.pt"));
  });
}

}  // namespace
}  // namespace ds::engine
