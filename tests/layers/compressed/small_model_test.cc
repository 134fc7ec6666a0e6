// The small model: it computes what the compressed one does, with fewer dimensions, and fewer layers begin as the
// teacher's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "dsengine/model_compression.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

ordered_json pruned(const ordered_json& shared, double ratio, const ordered_json& modules,
                    const ordered_json& related) {
  ordered_json all = {{"enabled", true}, {"schedule_offset", 0}};
  if (!shared.is_null()) all.update(shared);
  ordered_json result;
  result["shared_parameters"] = all;
  result["different_groups"]["g"]["params"]["dense_ratio"] = ratio;
  result["different_groups"]["g"]["modules"] = modules;
  if (!related.is_null()) result["different_groups"]["g"]["related_modules"] = related;
  return result;
}

// Two blocks of attention of 3 heads and a feed-forward pair, as transformers have them: [batch, time, 12].
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    qkv = register_module("qkv", torch::nn::Linear(12, 36));
    output = register_module("output", torch::nn::Linear(12, 12));
    up = register_module("up", torch::nn::Linear(12, 20));
    down = register_module("down", torch::nn::Linear(20, 12));
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t size = qkv->weight.size(0) / 3;
    const auto split = qkv(x).split(size, 2);
    const auto heads = [&](const at::Tensor& t) { return t.view({t.size(0), t.size(1), -1, 4}).transpose(1, 2); };
    const at::Tensor mixed =
        torch::scaled_dot_product_attention(heads(split[0]), heads(split[1]), heads(split[2])).transpose(1, 2);
    const at::Tensor h = x + output(mixed.reshape({x.size(0), x.size(1), size}));
    return h + down(torch::relu(up(h)));
  }
  torch::nn::Linear qkv{nullptr}, output{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t count) {
    layers = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < count; ++i) layers->push_back(Block());
    last = register_module("last", torch::nn::Linear(12, 2));
    fill(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<Block>()->forward(x);
    return last(x);
  }
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Stack);

at::Tensor tokens() { return torch::cos(torch::arange(2 * 5 * 12, torch::kFloat) * 1.3).view({2, 5, 12}); }

ordered_json transformer_config() {
  ordered_json section;
  section["row_pruning"] = pruned({{"method", "topk"}}, 0.5, {"up"}, {{"down"}});
  section["head_pruning"] = pruned({{"method", "topk"}, {"num_heads", 3}}, 0.6, {R"(layers\.\d+\.output)"}, {{"qkv"}});
  section["sparse_pruning"] = pruned({{"method", "l1"}}, 0.7, {"last"}, nullptr);
  ordered_json config = small_config(0, 1);
  config["log_level"] = "warning";
  config["compression_training"] = section;
  return config;
}

TEST(SmallModel, HasFewerDimensionsAndComputesTheSame) {
  Stack model(2);
  init_compression(*model, transformer_config());
  set_compression_step(*model, 0);
  const at::Tensor expected = model->forward(tokens());
  redundancy_clean(*model);
  EXPECT_TRUE(torch::allclose(model->forward(tokens()), expected, 1e-5, 1e-6));
  const auto& block = *model->layers[1]->as<Block>();
  EXPECT_EQ(block.up->weight.sizes(), (std::vector<int64_t>{10, 12}));
  EXPECT_EQ(block.up->bias.sizes(), (std::vector<int64_t>{10}));
  EXPECT_EQ(block.up->options.out_features(), 10);
  EXPECT_EQ(block.down->weight.sizes(), (std::vector<int64_t>{12, 10}));
  EXPECT_EQ(block.output->weight.sizes(), (std::vector<int64_t>{12, 8}));
  EXPECT_EQ(block.qkv->weight.sizes(), (std::vector<int64_t>{24, 12}));
  EXPECT_EQ(model->last->weight.count_nonzero().item<int64_t>(), 17);  // ceil(0.7 * 24)
  for (const auto& item : model->named_parameters()) EXPECT_THAT(item.key(), testing::Not(HasSubstr("scores")));
  EXPECT_TRUE(model->named_buffers().is_empty());
}

TEST(SmallModel, OfAnEngineIsWrittenAndRead) {
  for (const int stage : {0, 2, 3}) {
    const test::ScratchFolder folder;
    const std::string path = (folder.path() / "small.safetensors").string();
    run_ranks(2, [&](comm::Communicator& communicator) {
      ordered_json config = transformer_config();
      config["zero_optimization"] = small_config(stage, 1)["zero_optimization"];
      Stack model(2);
      const auto parts = start(model.ptr(), config, communicator);
      for (int step = 0; step < 3; ++step) {
        parts.engine->backward(model->forward(tokens() + communicator.rank()).pow(2).mean());
        parts.engine->step();
      }
      const auto small = redundancy_clean(parts.engine);
      const torch::NoGradGuard no_grad;
      const at::Tensor expected = model->forward(tokens());
      if (communicator.rank() != 0) return;
      checkpoint::write_weights(path, small);
      Stack loaded(2);
      load_small_model(*loaded, small);
      EXPECT_EQ(loaded->layers[0]->as<Block>()->up->weight.size(0), 10);
      EXPECT_TRUE(torch::allclose(loaded->forward(tokens()), expected, 1e-5, 1e-6)) << "stage " << stage;
    });
  }
}

struct PicturesImpl : torch::nn::Module {
  PicturesImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(6));
    next = register_module("next", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 5, 3).padding(1)));
    last = register_module("last", torch::nn::Linear(5 * 16, 3));
    fill(*this);
    const torch::NoGradGuard no_grad;
    norm->running_mean.copy_(torch::arange(6) * 0.1);
    norm->running_var.copy_(torch::arange(1, 7) * 0.5);
    norm->bias.zero_();  // what a pruned channel still says
    norm->running_mean.zero_();
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(next(torch::relu(norm(conv(x))))).flatten(1)); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Conv2d next{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Pictures);

TEST(SmallModel, LosesChannelsWithTheLayersThatSeeThem) {
  Pictures model;
  model->eval();
  ordered_json config;
  config["compression_training"]["channel_pruning"] =
      pruned({{"method", "l1"}}, 0.5, {"^conv", "^next"}, {{"norm", "next"}, {"last"}});
  init_compression(*model, config);
  set_compression_step(*model, 0);
  const at::Tensor x = torch::sin(torch::arange(2 * 2 * 16, torch::kFloat)).view({2, 2, 4, 4});
  const at::Tensor expected = model->forward(x);
  redundancy_clean(*model);
  EXPECT_TRUE(torch::allclose(model->forward(x), expected, 1e-5, 1e-6));
  EXPECT_EQ(model->conv->weight.sizes(), (std::vector<int64_t>{3, 2, 3, 3}));
  EXPECT_EQ(model->norm->running_var.size(0), 3);
  EXPECT_EQ(model->next->weight.sizes(), (std::vector<int64_t>{3, 3, 3, 3}));
  EXPECT_EQ(model->last->weight.sizes(), (std::vector<int64_t>{3, 48}));
}

TEST(SmallModel, RefusesAMethodThatHasNotBegun) {
  Stack model(2);
  ordered_json config = transformer_config();
  config["compression_training"]["row_pruning"]["shared_parameters"]["schedule_offset"] = 5;
  init_compression(*model, config);
  set_compression_step(*model, 4);
  try {
    redundancy_clean(*model);
    FAIL() << "expected a UsageError";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("compression_training.row_pruning.different_groups.g is in force"));
  }
}

TEST(SmallModel, RefusesRelatedLayersInAnotherNumber) {
  Stack model(2);
  ordered_json config = transformer_config();
  config["compression_training"]["row_pruning"] = pruned({}, 0.5, {"up"}, {{"last"}});
  EXPECT_THROW(init_compression(*model, config), ConfigError);
}

TEST(LayerReduction, TheStudentBeginsWithTheTeachersLayers) {
  Stack student(2);
  Stack teacher(4);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : teacher->parameters()) parameter.add_(0.5);
  }
  ordered_json config;
  config["compression_training"]["layer_reduction"] = {{"enabled", true},
                                                       {"keep_number_layer", 2},
                                                       {"module_name_prefix", "layers"},
                                                       {"teacher_layer", {1, 3}},
                                                       {"other_module_name", {"last"}}};
  init_compression(*student, config, teacher.get());
  const auto of = [](Stack& stack, size_t i) { return stack->layers[i]->as<Block>()->up->weight; };
  EXPECT_TRUE(torch::equal(of(student, 0), of(teacher, 1)));
  EXPECT_TRUE(torch::equal(of(student, 1), of(teacher, 3)));
  EXPECT_TRUE(torch::equal(student->last->weight, teacher->last->weight));
  const auto message = [&](const char* key, const ordered_json& value) -> std::string {
    ordered_json wrong = config;
    wrong["compression_training"]["layer_reduction"][key] = value;
    Stack other(2);
    try {
      init_compression(*other, wrong, teacher.get());
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message("teacher_layer", {1, 7}),
              HasSubstr("teacher_layer: expected the teacher to have a module layers.7"));
  EXPECT_THAT(message("teacher_layer", {1}), HasSubstr("keep_number_layer"));
  EXPECT_THAT(message("other_module_name", {"head"}), HasSubstr("other_module_name: expected the student"));
  Stack without(2);
  EXPECT_THROW(init_compression(*without, config), UsageError);
}

}  // namespace
}  // namespace ds::engine
