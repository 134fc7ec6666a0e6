// Every optimizer against torch.optim, or DeepSpeed's formulas (optimizers_reference.json, made by
// optimizers_reference.py).
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/optim/sharded_model.h"

namespace ds::optimizers {
namespace {

using nlohmann::json;

struct Case {
  std::string name;
  OptimizerOptions options;
  double tolerance;  // of weights of size about 1, after 50 steps
};

std::vector<Case> cases() {
  const std::vector<GroupOptions> adamw = {{.lr = 1e-2, .weight_decay = 0.1}};
  const std::vector<GroupOptions> adam = {{.lr = 1e-2, .weight_decay = 0.05, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6}};
  const std::vector<GroupOptions> muon = {{.lr = 0.02, .weight_decay = 0.1, .momentum = 0.95},
                                          {.lr = 3e-3, .weight_decay = 0.1, .beta2 = 0.95, .eps = 1e-10}};
  std::vector<GroupOptions> muon_plain = muon;
  for (GroupOptions& group : muon_plain) group.weight_decay = 0;
  return {
      {"adamw_fused", {.type = "AdamW", .groups = adamw}, 6e-8},
      {"adamw_foreach", {.type = "adamw", .groups = adamw}, 5e-7},
      {"adam_fused", {.type = "Adam", .groups = adam, .values = {.adam_w_mode = false}}, 6e-8},
      {"adam_foreach", {.type = "Adam", .groups = adam, .values = {.adam_w_mode = false}}, 5e-7},
      {"adamw_amsgrad", {.type = "Adam", .groups = adamw, .values = {.amsgrad = true}}, 5e-7},
      {"sgd", {.type = "SGD", .groups = {{.lr = 0.05, .weight_decay = 0.01}}}, 5e-7},
      {"sgd_momentum",
       {.type = "SGD", .groups = {{.lr = 0.05, .weight_decay = 0.01, .momentum = 0.9}}, .values = {.dampening = 0.3}},
       5e-7},
      {"sgd_nesterov", {.type = "SGD", .groups = {{.lr = 0.05, .momentum = 0.9}}, .values = {.nesterov = true}}, 5e-7},
      {"adagrad",
       {.type = "Adagrad",
        .groups = {{.lr = 0.05, .weight_decay = 0.01, .eps = 1e-10}},
        .values = {.lr_decay = 0.02, .initial_accumulator_value = 0.1}},
       5e-7},
      {"adagrad_default", {.type = "Adagrad", .groups = {default_group_options("Adagrad")}}, 5e-7},
      {"rmsprop",
       {.type = "RMSprop",
        .groups = {{.lr = 0.01, .weight_decay = 0.01, .momentum = 0.5}},
        .values = {.centered = true}},
       2e-6},
      {"rmsprop_default", {.type = "RMSprop", .groups = {default_group_options("RMSprop")}}, 1e-6},
      {"adamax", {.type = "Adamax", .groups = {{.lr = 0.01, .weight_decay = 0.01, .beta1 = 0.8, .beta2 = 0.95}}}, 1e-6},
      {"nadam", {.type = "NAdam", .groups = {{.lr = 0.01, .weight_decay = 0.01}}}, 1e-6},
      {"nadam_decoupled",
       {.type = "NAdam",
        .groups = {{.lr = 2e-3, .weight_decay = 0.1}},
        .values = {.momentum_decay = 0.02, .decoupled_weight_decay = true}},
       1e-6},
      {"radam", {.type = "RAdam", .groups = {{.lr = 0.01, .weight_decay = 0.01, .beta2 = 0.99}}}, 1e-6},
      {"radam_decoupled",
       {.type = "RAdam", .groups = {{.lr = 1e-3, .weight_decay = 0.1}}, .values = {.decoupled_weight_decay = true}},
       1e-6},
      {"adadelta", {.type = "Adadelta", .groups = {{.lr = 1.0, .weight_decay = 0.01, .eps = 1e-6}}}, 1e-6},
      {"lion", {.type = "Lion", .groups = {{.lr = 1e-2, .weight_decay = 0.1, .beta2 = 0.99}}}, 1e-6},
      {"lamb", {.type = "Lamb", .groups = {{.lr = 1e-2, .weight_decay = 0.01}}}, 1e-6},
      {"lamb_eps_inside",
       {.type = "Lamb",
        .groups = {{.lr = 1e-2, .beta2 = 0.99, .eps = 1e-4}},
        .values = {.bias_correction = false, .max_coeff = 0.5, .min_coeff = 0.08, .eps_inside_sqrt = true}},
       1e-6},
      {"muon_gram", {.type = "Muon", .groups = muon, .values = {.ns_method = "gram"}}, 1e-6},
      {"muon_standard", {.type = "Muon", .groups = muon_plain, .values = {.ns_method = "standard"}}, 1e-6},
  };
}

class Reference : public testing::TestWithParam<Case> {};

TEST_P(Reference, WeightsAgreeForFiftySteps) {
  std::ifstream file(DS_TEST_FOLDER "/optimizers_reference.json");
  const json reference = json::parse(file).at(GetParam().name);
  const bool muon = GetParam().options.type == "Muon";
  ShardedModel model(GetParam().options, muon ? muon_buckets() : one_bucket(), std::make_shared<Alone>());
  int64_t done = 0;
  for (const int64_t steps : {1, 2, 10, 50}) {
    model.run(done + 1, steps + 1);
    done = steps;
    const at::Tensor expected =
        at::tensor(reference.at(std::to_string(steps)).get<std::vector<double>>()).to(at::kFloat);
    const double error = (model.weights() - expected).abs().max().item<double>();
    RecordProperty("error_after_" + std::to_string(steps), std::to_string(error * 1e9) + "e-9");
    EXPECT_LE(error, GetParam().tolerance) << "after " << steps << " steps";
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Reference, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ds::optimizers
