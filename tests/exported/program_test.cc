// The pieces of an exported program: sizes, names, inputs, modes, and what is said of what cannot be run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/engine.h"
#include "dsengine/exported_model.h"
#include "dsengine/sync_batch_norm.h"
#include "dsengine/zero.h"
#include "exported/input_check.h"
#include "exported/number_functions.h"
#include "exported/program.h"
#include "exported/size_expression.h"
#include "exported/tree_names.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::exported {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string data(const std::string& name) {
  return std::string(DS_SOURCE_DIR) + "/tests/exported/data/" + name + ".pt2";
}

c10::IValue computed(const std::string& name, const std::vector<c10::IValue>& numbers) {
  return number_function(name)(numbers);
}

TEST(ExportedSizes, ExpressionsAreThoseOfSympy) {
  const SizeExpression plain("Symbol('s77', positive=True, integer=True)");
  EXPECT_EQ(plain.symbol(), "s77");
  EXPECT_EQ(plain.value({{"s77", 6}}), 6);
  EXPECT_EQ(plain.value({}), std::nullopt);
  const SizeExpression sum("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))");
  EXPECT_EQ(sum.symbol(), "");
  EXPECT_EQ(sum.value({{"s0", 5}}), 9);
  EXPECT_EQ(sum.in_words(), "2*s0 + -1");
  EXPECT_EQ(SizeExpression("FloorDiv(Symbol('s0', integer=True), Integer(0))").value({{"s0", 5}}), std::nullopt);
}

TEST(ExportedSizes, DerivedDimensionsAreSolvedForTheirSymbol) {
  const SizeExpression odd("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))");
  EXPECT_EQ(odd.solved({}, 9), (std::optional(std::pair(std::string("s0"), int64_t{4}))));
  EXPECT_EQ(odd.solved({}, 8), std::nullopt);
  EXPECT_EQ(odd.solved({{"s0", 4}}, 9), std::nullopt) << "nothing is unknown";
  const SizeExpression two("Add(Symbol('s0', integer=True), Symbol('s1', integer=True))");
  EXPECT_EQ(two.solved({}, 9), std::nullopt);
  EXPECT_EQ(two.solved({{"s0", 4}}, 9), (std::optional(std::pair(std::string("s1"), int64_t{5}))));
}

// A hostile file may have any numbers: what does not fit is no size, and nothing wraps around.
TEST(ExportedSizes, WhatDoesNotFitIsNoSize) {
  constexpr int64_t kHalf = int64_t{1} << 62;
  const SizeExpression twice("Mul(Integer(2), Symbol('s0', integer=True))");
  EXPECT_EQ(twice.value({{"s0", 4'500'000'000'000'000'000}}), 9'000'000'000'000'000'000);
  EXPECT_EQ(twice.value({{"s0", kHalf}}), std::nullopt);
  EXPECT_EQ(twice.solved({}, INT64_MIN), std::nullopt);
  EXPECT_EQ(SizeExpression("Pow(Symbol('s0', integer=True), Integer(8))").value({{"s0", 1000}}), std::nullopt);
  const SizeExpression down("Add(Integer(9223372036854775807), Mul(Integer(-1), Symbol('s0', integer=True)))");
  EXPECT_EQ(down.solved({}, INT64_MIN), std::nullopt);
  EXPECT_EQ(down.value({{"s0", -2}}), std::nullopt);
}

TEST(ExportedSizes, WhatIsNoExpressionIsTold) {
  const auto said = [](const std::string& text) { return test::thrown_by<IoError>([&] { SizeExpression{text}; }); };
  EXPECT_THAT(said("Sin(Integer(2))"), HasSubstr("unknown function \"Sin\""));
  EXPECT_THAT(said("Add(Integer(2)"), HasSubstr("has no \",\""));
  EXPECT_THAT(said("Symbol('s0"), HasSubstr("does not end"));
  EXPECT_THAT(said(""), HasSubstr("has no number or symbol"));
  EXPECT_THAT(said("Integer(1))"), HasSubstr("goes on behind its end"));
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "Add(";
  EXPECT_THAT(said(deep), HasSubstr("too many brackets"));
}

TEST(ExportedSizes, FunctionsComputeAsPython) {
  EXPECT_EQ(computed("_operator.floordiv", {int64_t{-7}, int64_t{2}}).toInt(), -4);
  EXPECT_EQ(computed("_operator.mod", {int64_t{-7}, int64_t{2}}).toInt(), 1);
  EXPECT_EQ(computed("_operator.truediv", {int64_t{7}, int64_t{2}}).toDouble(), 3.5);
  EXPECT_EQ(computed("_operator.pow", {int64_t{3}, int64_t{4}}).toInt(), 81);
  EXPECT_EQ(computed("_operator.mul", {int64_t{3}, 0.5}).toDouble(), 1.5);
  EXPECT_EQ(computed("torch.sym_max", {int64_t{3}, int64_t{4}}).toInt(), 4);
  EXPECT_EQ(computed("math.ceil", {2.1}).toInt(), 3);
  EXPECT_TRUE(computed("_operator.ge", {int64_t{4}, int64_t{4}}).toBool());
  EXPECT_THROW(computed("_operator.floordiv", {int64_t{1}, int64_t{0}}), UsageError);
  EXPECT_EQ(number_function("math.lgamma"), nullptr);
  EXPECT_TRUE(is_number_function("math.lgamma"));
}

TEST(ExportedNames, LeavesAreNamedByTheirContainers) {
  const std::string leaf = R"({"type": null, "context": null, "children_spec": []})";
  const std::string pair =
      R"({"type": "builtins.tuple", "context": "null", "children_spec": [)" + leaf + "," + leaf + "]}";
  const std::string outputs = R"([1, {"type": "builtins.dict", "context": "[\"loss\", \"past\"]", "children_spec": [)" +
                              leaf + "," + pair + "]}]";
  EXPECT_THAT(output_names(outputs), ElementsAre("loss", "past.0", "past.1"));
  EXPECT_THAT(output_names("[1, " + leaf + "]"), ElementsAre("0"));
  EXPECT_THAT(output_names("no json"), ElementsAre());
  const std::string arguments = R"({"type": "builtins.tuple", "context": "null", "children_spec": [)" + leaf + "]}";
  const std::string keywords = R"({"type": "builtins.dict", "context": "[\"mask\"]", "children_spec": [)" + leaf + "]}";
  const std::string both =
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [)" + arguments + "," + keywords + "]}]";
  EXPECT_THAT(input_names(both, {"x"}), ElementsAre("x", "mask"));
}

TEST(ExportedInputsTest, AreCheckedBeforeAnythingRuns) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("mlp"));
  ASSERT_EQ(model->inputs().size(), 1U);
  const ExportedInput& input = model->inputs()[0];
  ASSERT_EQ(input.sizes.size(), 2U);
  EXPECT_FALSE(input.sizes[0].symbol.empty());
  const int64_t width = input.sizes[1].least;
  const auto said = [&](const ExportedInputs& inputs) {
    return test::thrown_by<UsageError>([&] { model->forward(inputs); });
  };
  EXPECT_THAT(said({{input.name, at::zeros({4, width + 1})}}),
              AllOf(HasSubstr("forward: \"" + input.name + "\" is [4, " + std::to_string(width + 1) + "]"),
                    HasSubstr("not as a dynamic one")));
  EXPECT_THAT(said({{input.name, at::zeros({width})}}), HasSubstr("exported with 2 dimensions"));
  EXPECT_THAT(said({{input.name, at::zeros({4, width}, at::kLong)}}), HasSubstr("is of dtype Long, exported as Float"));
  EXPECT_THAT(said({{"y", at::zeros({4, width})}}), HasSubstr("the input \"" + input.name + "\" is missing"));
  EXPECT_THAT(said({{input.name, at::zeros({4, width})}, {"y", 1}}), HasSubstr("no input \"y\""));
  EXPECT_EQ(model->forward(at::zeros({6, width})).size(0), 6);
}

TEST(ExportedMode, EvalDropsNothingAndCountsNoBatches) {
  const std::shared_ptr<ExportedModule> mlp = load_exported(data("mlp"));
  const at::Tensor x = at::ones({8, mlp->inputs()[0].sizes[1].least});
  EXPECT_FALSE(mlp->forward(x).equal(mlp->forward(x))) << "dropout draws in train()";
  mlp->eval();
  EXPECT_TRUE(mlp->forward(x).equal(mlp->forward(x)));

  const std::shared_ptr<ExportedModule> resnet = load_exported(data("resnet"));
  const auto counts = [&] {
    int64_t sum = 0;
    for (const auto& item : resnet->named_buffers()) {
      if (item.key().ends_with("num_batches_tracked")) sum += item.value().item<int64_t>();
    }
    return sum;
  };
  std::vector<int64_t> sizes = {4};
  for (size_t d = 1; d < resnet->inputs()[0].sizes.size(); ++d) sizes.push_back(resnet->inputs()[0].sizes[d].least);
  const int64_t before = counts();
  resnet->forward(at::ones(sizes));
  const int64_t trained = counts();
  EXPECT_GT(trained, before);
  resnet->eval();
  resnet->forward(at::ones(sizes));
  EXPECT_EQ(counts(), trained);
}

// As numbers() of export_pieces.py.
at::Tensor numbers_of_pieces(double sign) {
  return at::arange(6 * 8, at::kFloat).sin().view({6, 8}) * 0.5 + sign * 0.1;
}

void expect_values(const at::Tensor& found, const nlohmann::json& expected, const std::string& name) {
  const at::Tensor flat = found.detach().to(at::kDouble).reshape({-1});
  const auto values = expected.get<std::vector<double>>();
  ASSERT_EQ(flat.numel(), static_cast<int64_t>(values.size())) << name;
  EXPECT_TRUE(at::allclose(flat, at::tensor(values, at::kDouble), 1e-6, 1e-6)) << name;
}

// Runs a file of export_pieces.py and compares outputs, gradients and buffers with Python's.
void expect_python(ExportedModule& model, const ExportedInputs& inputs, const nlohmann::json& expected) {
  const ExportedOutputs outputs = model.forward(inputs);
  at::Tensor sum = at::zeros({}, at::kDouble);
  ASSERT_EQ(outputs.size(), expected.at("outputs").size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::string& name = outputs.names()[i];
    const nlohmann::json& value = expected.at("outputs").at(name);
    const c10::IValue& found = outputs.values()[i];
    if (!found.isTensor()) {
      EXPECT_TRUE(found.isNone() ? value.is_null() : found.toInt() == value.get<int64_t>()) << name;
      EXPECT_THROW(outputs[name], UsageError);
      continue;
    }
    expect_values(found.toTensor(), value, name);
    if (found.toTensor().requires_grad()) sum = sum + found.toTensor().to(at::kDouble).sum();
  }
  sum.backward();
  for (const auto& item : model.named_parameters()) {
    if (!expected.at("gradients").contains(item.key())) continue;
    // A branch that is not taken gets zeros in Python, and nothing here.
    const at::Tensor& gradient = item.value().grad();
    const double norm = gradient.defined() ? gradient.to(at::kDouble).norm().item<double>() : 0.0;
    EXPECT_NEAR(norm, expected.at("gradients").at(item.key()), 1e-4) << item.key();
  }
  const auto buffers = model.named_buffers();
  for (const auto& [name, values] : expected.at("buffers").items()) expect_values(buffers[name], values, name);
}

nlohmann::json golden_pieces() {
  std::ifstream file(std::string(DS_SOURCE_DIR) + "/tests/exported/data/pieces.json");
  return nlohmann::json::parse(file);
}

TEST(ExportedPieces, BlocksBranchesSizesAndBuffersArePythons) {
  const nlohmann::json golden = golden_pieces();
  for (const auto& [sign, factor] : {std::pair("+", 1.0), std::pair("-", -1.0)}) {
    const std::shared_ptr<ExportedModule> model = load_exported(data("pieces"));
    const ExportedInputs inputs = {{"x", numbers_of_pieces(factor)}, {"mask", numbers_of_pieces(0) > 0.3}};
    expect_python(*model, inputs, golden.at("pieces").at(sign));
    const auto buffers = model->named_buffers();
    EXPECT_EQ(buffers.size(), 2U) << "a non-persistent buffer is in no state dict";
  }
}

TEST(ExportedPieces, AnotherValueThanTheBakedOneIsRefused) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("pieces"));
  const at::Tensor x = numbers_of_pieces(1);
  EXPECT_THAT(test::thrown_by<UsageError>([&] {
                model->forward({{"x", x}, {"mask", x > 0.3}, {"shift", 4}});
              }),
              AllOf(HasSubstr("\"shift\" was 3 when the model was exported"), HasSubstr("found 4")));
  EXPECT_NO_THROW(model->run({x, x > 0.3, 3, 0.25}));
  EXPECT_THAT(test::thrown_by<UsageError>([&] { model->forward(x, x > 0.3); }),
              HasSubstr("forward returns 7 values (loss, parts.0, parts.1, parts.2, top, rows, absent)"));
}

TEST(ExportedInputsTest, BakedNumbersAreComparedAsPythonDoes) {
  constexpr int64_t kLarge = (int64_t{1} << 53) + 1;  // no double is this number
  const auto takes = [](const c10::IValue& baked, const c10::IValue& given) {
    Program program;
    program.inputs.push_back({.name = "k", .is_tensor = false, .value = baked});
    return test::thrown_by<UsageError>([&] { check_inputs(program, {given}); }) == "no error";
  };
  EXPECT_TRUE(takes(3, 3.0));
  EXPECT_TRUE(takes(1, true));
  EXPECT_TRUE(takes(kLarge, kLarge));
  EXPECT_FALSE(takes(kLarge, kLarge - 1));
  EXPECT_FALSE(takes(kLarge, static_cast<double>(kLarge - 1)));
  EXPECT_TRUE(takes(static_cast<double>(kLarge - 1), kLarge - 1));
  EXPECT_FALSE(takes(static_cast<double>(kLarge - 1), kLarge));
  EXPECT_FALSE(takes(INT64_MAX, 9223372036854775808.0));
  EXPECT_TRUE(takes(std::nan(""), std::nan("")));
  EXPECT_FALSE(takes(std::nan(""), 3));
  EXPECT_TRUE(takes(c10::complex<double>(1, 2), c10::complex<double>(1, 2)));
  EXPECT_FALSE(takes(c10::complex<double>(1, 2), 1));
}

TEST(ExportedPieces, ASecondFileIsTheProgramOfEval) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("pieces"), {.eval = data("pieces_eval")});
  const ExportedInputs inputs = {{"x", numbers_of_pieces(1)}, {"mask", numbers_of_pieces(0) > 0.3}};
  model->eval();
  expect_python(*model, inputs, golden_pieces().at("pieces_eval").at("+"));
}

TEST(ExportedPieces, ADecomposedProgramReturnsItsBuffersAndHasOneMode) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("decomposed"));
  const ExportedInputs inputs = {{"x", numbers_of_pieces(1)}};
  expect_python(*model, inputs, golden_pieces().at("decomposed").at("+"));
  EXPECT_EQ(model->named_buffers()["bn.num_batches_tracked"].item<int64_t>(), 1);
  model->eval();
  EXPECT_THAT(test::thrown_by<UsageError>([&] { model->forward(inputs); }),
              AllOf(HasSubstr("was exported with run_decompositions()"), HasSubstr("ExportedOptions::eval")));
}

// What an operator throws while it runs.
TEST(ExportedPieces, AnErrorOfAnOperatorNamesItAndPythonsLine) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("decomposed"), {.baked_mode = true});
  const at::NoGradGuard no_grad;
  model->named_parameters()["fc.bias"].set_data(at::zeros({3}));
  EXPECT_THAT(test::thrown_by<UsageError>([&] { model->forward(numbers_of_pieces(1)); }),
              AllOf(HasSubstr("decomposed.pt2: node \"addmm\" (aten.addmm.default, in module \"fc\"): "),
                    HasSubstr("\nin Python: File \""), testing::Not(HasSubstr("frame #"))));
}

TEST(ExportedMode, AProgramOfTrainIsNoneForEval) {
  EXPECT_THAT(test::thrown_by<IoError>([] { load_exported(data("mlp"), {.eval = data("mlp")}); }),
              HasSubstr("was exported in train(), and is named as the program for eval()"));
  EXPECT_THAT(test::thrown_by<IoError>([] { load_exported(data("mlp"), {.eval = data("lstm")}); }),
              HasSubstr("export both from one model"));
}

TEST(ExportedMeta, HasNoMemoryAndItsValuesComeFromTheFile) {
  const std::shared_ptr<ExportedModule> full = load_exported(data("gpt"));
  full->eval();
  const at::Tensor tokens = at::arange(8, at::kLong).view({2, 4});
  const at::Tensor expected = full->forward(tokens).detach();
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    const std::shared_ptr<ExportedModule> model = load_exported(data("gpt"), {.meta = true});
    for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
    const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1}, {"zero_optimization", {{"stage", 3}}}};
    const auto started = engine::initialize(
        {.model = model, .config = config, .weights = data("gpt"), .communicator = test::borrowed(ranks)});
    model->eval();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(model->forward(tokens).equal(expected));
  });
}

TEST(ExportedMeta, InsideZeroInitNoRankHoldsTheModel) {
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    zero::Init init(test::borrowed(ranks), {.max_live = 0, .smallest = 16});
    const std::shared_ptr<ExportedModule> model = load_exported(data("gpt"));
    int64_t held = 0;
    for (const at::Tensor& parameter : model->parameters()) held += static_cast<int64_t>(parameter.storage().nbytes());
    int64_t all = 0;
    for (const at::Tensor& parameter : model->parameters()) all += static_cast<int64_t>(parameter.nbytes());
    EXPECT_LT(held, all / 2);
  });
}

TEST(ExportedBatchNorm, NormalizesOverTheBatchesOfAllRanks) {
  const std::shared_ptr<ExportedModule> single = load_exported(data("resnet"));
  std::vector<int64_t> sizes = {8};
  for (size_t d = 1; d < single->inputs()[0].sizes.size(); ++d) sizes.push_back(single->inputs()[0].sizes[d].least);
  at::Tensor x = at::arange(c10::multiply_integers(sizes), at::kFloat).sin().view(sizes);
  const at::Tensor whole = single->forward(x).detach();
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    const std::shared_ptr<ExportedModule> model = load_exported(data("resnet"));
    EXPECT_GT(convert_sync_batchnorm(*model, ranks).size(), 4U);
    const at::Tensor part = model->forward(x.chunk(2)[ranks.rank()]).detach();
    EXPECT_TRUE(at::allclose(part, whole.chunk(2)[ranks.rank()], 1e-4, 1e-5));
  });
}

TEST(ExportedDtype, BakedOnesAreToldWithPythonsLine) {
  const std::shared_ptr<ExportedModule> model = load_exported(data("hf_llama"));
  EXPECT_NO_THROW(model->require_dtype(at::kFloat, "bf16.enabled"));
  EXPECT_THAT(test::thrown_by<ConfigError>([&] { model->require_dtype(at::kBFloat16, "bf16.enabled"); }),
              AllOf(HasSubstr("bf16.enabled: "), HasSubstr("was exported in Float"), HasSubstr("torch_autocast"),
                    HasSubstr("in Python: File \"")));
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1}, {"bf16", {{"enabled", true}}}};
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    EXPECT_THROW(engine::initialize({.model = model, .config = config, .communicator = test::borrowed(ranks)}),
                 ConfigError);
  });
}

}  // namespace
}  // namespace ds::exported
