// .weights and load_module() of files that torch.save has written, in C++ and in Python.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "tests/porting/float64_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

const std::string kPython = std::string(DS_SOURCE_DIR) + "/tests/porting/torch_saved/";

// Modules in modules, buffers, a parameter that is not contiguous, modules without anything.
struct NestedImpl : torch::nn::Module {
  NestedImpl() {
    register_module("layers", layers);
    register_module("norm", norm);
    const at::Tensor values = torch::arange(12.0).view({3, 4}).t();
    turned = register_parameter("turned", values);
    fill(*this);
  }
  torch::nn::Sequential layers{torch::nn::Linear(6, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4)};
  torch::nn::BatchNorm1d norm{4};
  at::Tensor turned;
};
TORCH_MODULE(Nested);

State all_of(const torch::nn::Module& module) {
  State state = parameters_of(module);
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value().detach().clone();
  return state;
}

Nested other_values() {
  Nested model;
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) parameter.mul_(-0.5).add_(0.1);
  model->norm->running_mean.add_(3);
  model->norm->num_batches_tracked.fill_(17);
  return model;
}

Initialized start_from(const std::shared_ptr<torch::nn::Module>& model, const std::string& weights, int stage,
                       comm::Communicator& communicator) {
  return initialize(
      {.model = model, .config = small_config(stage, 1), .weights = weights, .communicator = borrowed(communicator)});
}

TEST(TorchFiles, AModelBeginsWithWhatLibTorchSaved) {
  const test::ScratchFolder folder;
  const Nested saved = other_values();
  torch::save(saved, folder / "model.pt");
  torch::serialize::OutputArchive archive;
  saved->save(archive);
  archive.save_to(folder / "archive");  // without an extension
  for (const char* file : {"model.pt", "archive"}) {
    for (const int stage : {0, 1, 2, 3}) {
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        Nested model;
        const auto engine = start_from(model.ptr(), folder / file, stage, communicator).engine;
        const State found = copy_of(engine->module_state_dict());
        EXPECT_EQ(largest_difference(found, all_of(*saved)), 0.0) << file << " stage " << stage;
      });
    }
    Nested filled;
    checkpoint::load_module(*checkpoint::open_weights(folder / file), *filled);
    EXPECT_EQ(largest_difference(all_of(*filled), all_of(*saved)), 0.0);
    EXPECT_EQ(largest_difference(all_of(*filled), all_of(*Nested())) > 0, true);
    checkpoint::load_module(*checkpoint::open(folder / file), *filled);
  }
}

TEST(TorchFiles, Float64KeepsItsDigits) {
  const test::ScratchFolder folder;
  SmallNet saved = double_net();
  torch::save(saved, folder / "model.pt");
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->to(torch::kDouble);
    const auto engine = start_from(model.ptr(), folder / "model.pt", 2, communicator).engine;
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*saved)), 0.0);
  });
}

// Made by tests/porting/torch_saved.py, whose net begins as SmallNet does.
TEST(TorchFiles, AModelBeginsWithWhatPythonSaved) {
  const SmallNet expected;
  for (const int stage : {0, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.zero_();
      const auto engine = start_from(model.ptr(), kPython + "state_dict.pt", stage, communicator).engine;
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*expected)), 0.0);
    });
  }
}

void expect_refused(const std::string& file, const std::vector<std::string>& parts) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    try {
      start_from(model.ptr(), file, 1, communicator);
      ADD_FAILURE() << file << " was taken";
    } catch (const std::exception& error) {
      for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
      EXPECT_THAT(error.what(), HasSubstr(file));
    }
  });
}

TEST(TorchFiles, WhatIsNoStateDictIsNamedAndNeverRun) {
  ::testing::internal::CaptureStderr();
  expect_refused(kPython + "calls.pt", {"byte ", "it asks its reader to call posix.system"});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("dsengine-ran-this")));
  expect_refused(kPython + "whole_module.pt",
                 {"an object of class torch.nn.modules.linear.Linear", "torch.save(model.state_dict(), path)"});
  expect_refused(kPython + "training_state.pt", {"\"epoch\" is the int 3", "torch.save(model.state_dict(), path)"});
}

TEST(TorchFiles, OtherShapesAndMissingNamesAreErrorsAndSurplusOnesWarnings) {
  const test::ScratchFolder folder;
  struct WiderImpl : torch::nn::Module {
    WiderImpl() {
      register_module("first", torch::nn::Linear(6, 12));
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({11})));
      register_module("last", torch::nn::Linear(11, 3));
    }
  };
  torch::save(std::make_shared<WiderImpl>(), folder / "wider.pt");
  expect_refused(folder / "wider.pt", {"tensor \"first.weight\"", "expected shape [11, 6], found [12, 6]"});
  torch::save(torch::nn::Linear(6, 11), folder / "layer.pt");
  expect_refused(folder / "layer.pt", {"has no tensor \"first.weight\"", "it has 2 tensors", "\"bias\""});

  struct LargerImpl : SmallNetImpl {
    LargerImpl() { register_module("more", torch::nn::Linear(1, 1)); }
  };
  torch::save(std::make_shared<LargerImpl>(), folder / "larger.pt");
  ::testing::internal::CaptureStderr();
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    start_from(model.ptr(), folder / "larger.pt", 1, communicator);
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("2 tensors are not in the model: more.bias, more.weight"));
}

TEST(TorchFiles, DamagedAndForeignFilesAreNamed) {
  const test::ScratchFolder folder;
  torch::save(SmallNet(), folder / "model.pt");
  std::filesystem::resize_file(folder / "model.pt", std::filesystem::file_size(folder / "model.pt") - 40);
  expect_refused(folder / "model.pt", {"truncated, damaged or something else"});
  folder.write("text.pt", "no weights");
  expect_refused(folder / "text.pt", {"expected a file of torch.save"});
  expect_refused(folder / "absent.pt", {"no such file"});
  torch::save(torch::optim::SGD(SmallNet()->parameters(), 0.1), folder / "optimizer.pt");
  expect_refused(folder / "optimizer.pt", {"has no tensor \"first.weight\"", "param_groups"});
}

// Nested so deep, or so often, that following it would not end.
TEST(TorchFiles, ANameWithoutEndIsRefused) {
  const test::ScratchFolder folder;
  torch::serialize::OutputArchive archive;
  archive.write(std::string(2000, 'n'), torch::ones({2}));
  archive.save_to(folder / "model.pt");
  expect_refused(folder / "model.pt", {"begins with \"nnnn", "has 2000 characters", "at most 1024"});
}

TEST(TorchFiles, AModuleOfManyLevelsIsReadToItsEnd) {
  const test::ScratchFolder folder;
  std::shared_ptr<torch::nn::Module> deep = torch::nn::Linear(2, 2).ptr();
  const auto wrap = [&deep](int levels) {
    for (int level = 0; level < levels; ++level) {
      const auto outer = std::make_shared<torch::nn::Module>("Outer");
      outer->register_module("inner", deep);
      deep = outer;
    }
  };
  wrap(60);
  torch::save(deep, folder / "deep.pt");
  EXPECT_EQ(checkpoint::open_weights(folder / "deep.pt")->tensors().size(), 2U);
  wrap(60);
  torch::save(deep, folder / "deeper.pt");
  EXPECT_THAT([&] { checkpoint::open_weights(folder / "deeper.pt"); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("deeper.pt"), HasSubstr("at most 100 modules in one another"))));
}

}  // namespace
}  // namespace ds::engine
