// What no rule computes: joined, right, and told. And what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "model/state/model_layout.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;
using testing::HasSubstr;

TEST(JoinedOperators, ConvolutionAndBatchNorm) {
  torch::manual_seed(5);
  const at::Tensor image = at::randn({4, 3, 8, 8});
  using Net = torch::nn::SequentialImpl;
  expect_same_as_whole<Net>(
      [] {
        return std::make_shared<Net>(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::ReLU(),
                                     torch::nn::Flatten(), torch::nn::Linear(8 * 36, 32), torch::nn::Tanh(),
                                     torch::nn::BatchNorm1d(32), torch::nn::Linear(32, 4));
      },
      [&](Net& net) { return net.forward(image).pow(2).mean(); },
      {.ranks = 2,
       .rules = {{.pattern = "0", .style = kColumn},
                 {.pattern = "3", .style = kColumn},
                 {.pattern = "6", .style = kRow}},
       .tolerance = 1e-5,
       .joins = true});
}

TEST(JoinedOperators, Lstm) {
  torch::manual_seed(5);
  const at::Tensor sequence = at::randn({6, 3, 16});
  expect_same_as_whole<torch::nn::LSTMImpl>(
      [] { return std::make_shared<torch::nn::LSTMImpl>(torch::nn::LSTMOptions(16, 32).num_layers(2)); },
      [&](torch::nn::LSTMImpl& lstm) { return std::get<0>(lstm.forward(sequence)).pow(2).mean(); },
      {.ranks = 2,
       .rules = {{.pattern = "weight_ih_l0", .style = kColumn, .blocks = {32, 32, 32, 32}},
                 {.pattern = "weight_hh_l1", .style = kColumn}},
       .tolerance = 2e-6,
       .joins = true});
}

// A program's own function, which knows nothing of split tensors.
struct WeightedCube : torch::autograd::Function<WeightedCube> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * x * x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 * saved[0] * saved[0] * saved[1], gradients[0] * saved[0] * saved[0] * saved[0]};
  }
};

struct WithFunction : torch::nn::Module {
  WithFunction() {
    first = register_module("first", torch::nn::Linear(8, 16));
    weight = register_parameter("weight", at::randn({4, 16}));
    second = register_module("second", torch::nn::Linear(16, 8));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor weight;
};

TEST(JoinedOperators, AutogradFunctionsOfAProgram) {
  torch::manual_seed(5);
  const at::Tensor x = at::randn({4, 8});
  expect_same_as_whole<WithFunction>(
      [] { return std::make_shared<WithFunction>(); },
      [&](WithFunction& model) { return model.second(WeightedCube::apply(model.first(x), model.weight)).pow(2).sum(); },
      {.ranks = 2, .rules = {{.pattern = "first", .style = kColumn}, {.pattern = "second", .style = kRow}}});
}

void on_axis(int ranks, const std::function<void(const std::shared_ptr<Axis>&, int rank)>& body) {
  test::run_ranks(
      ranks, [&](comm::Communicator& communicator) { body(make_axis(shared(communicator)), communicator.rank()); });
}

TEST(JoinedOperators, AreCountedByOperatorWithTheirBytes) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    torch::nn::Linear layer(8, 6);
    const SplitModule split = parallelize_module(*layer, shared(communicator), {{.pattern = "weight"}});
    EXPECT_TRUE(split.joined_operators().empty());
    const at::Tensor flipped = layer->weight.flip({0});
    EXPECT_FALSE(is_split(flipped));
    EXPECT_EQ(relative_error(flipped, whole(layer->weight).flip({0})), 0);
    layer->weight.flip({0});
    const std::vector<JoinedOperator> joined = split.joined_operators();
    ASSERT_EQ(joined.size(), 1U);
    EXPECT_EQ(joined[0].name, "aten::flip");
    EXPECT_EQ(joined[0].calls, 2);
    EXPECT_EQ(joined[0].bytes, 2 * 48 * 4);
    EXPECT_EQ(joined[0].parameters, "weight");
    split.reset_joined_operators();
    EXPECT_TRUE(split.joined_operators().empty());
  });
}

TEST(JoinedOperators, ChangesInPlaceReachTheParts) {
  on_axis(2, [](const std::shared_ptr<Axis>& axis, int rank) {
    const at::Tensor plain = at::arange(24, at::kFloat).view({4, 6});
    const at::Tensor x = distribute(plain, axis, 1);
    x.index_fill_(0, at::tensor({1}, at::kLong), -1.0);  // joined
    x.add_(at::arange(6, at::kFloat));                   // on parts
    x.t().mul_(2);                                       // through a view
    const at::Tensor expected = (plain.clone().index_fill_(0, at::tensor({1}, at::kLong), -1.0) + at::arange(6)) * 2;
    EXPECT_EQ(relative_error(whole(x), expected), 0);
    EXPECT_EQ(relative_error(local_part(x), expected.narrow(1, 3 * rank, 3)), 0);
    EXPECT_EQ(relative_error(plain, at::arange(24, at::kFloat).view({4, 6})), 0) << "distribute() copies";
  });
}

TEST(JoinedOperators, ChangesInPlaceHaveGradients) {
  const at::Tensor values = at::arange(24, at::kFloat).view({4, 6}) / 10;
  const auto loss_of = [](const at::Tensor& x, const at::Tensor& y) {
    x.mul_(y);
    x.index_copy_(0, at::tensor({2}, at::kLong), y.narrow(0, 0, 1));
    x.narrow(0, 1, 2).add_(y.narrow(0, 1, 2));  // the base gets the history of its view
    return x.pow(2).sum();
  };
  const at::Tensor y = (values + 1).requires_grad_();
  loss_of(values.clone(), y).backward();
  on_axis(2, [&](const std::shared_ptr<Axis>& axis, int /*rank*/) {
    const at::Tensor own = (values + 1).requires_grad_();
    loss_of(distribute(values, axis, 1), own).backward();
    EXPECT_LE(relative_error(own.grad(), y.grad()), 1e-6);
  });
}

TEST(JoinedOperators, ViewsOfJoinedTensorsRefuseChanges) {
  on_axis(2, [](const std::shared_ptr<Axis>& axis, int /*rank*/) {
    const at::Tensor x = distribute(at::ones({4, 6}), axis, 1);
    const at::Tensor view = x.select(1, 2);  // of one rank's columns: joined
    EXPECT_EQ(view.sum().item<float>(), 4);
    try {
      view.zero_();
      ADD_FAILURE() << "a change that would be lost";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("view of a tensor that was joined"));
    }
    EXPECT_EQ(view.clone().zero_().sum().item<float>(), 0);
    EXPECT_THROW(x.t_(), UsageError) << "what a tensor shows of its memory";
  });
}

TEST(JoinedOperators, ViewsThatNoSchemaTellsOfRefuseChangesToo) {
  on_axis(2, [](const std::shared_ptr<Axis>& axis, int /*rank*/) {
    const at::Tensor x = distribute(at::ones({4, 6}), axis, 1);
    const at::Tensor view = x.select(1, 2);  // joined
    EXPECT_THROW(at::broadcast_tensors({view})[0].zero_(), UsageError);
    EXPECT_THROW(at::meshgrid({view, view}, "ij")[0].zero_(), UsageError);
  });
}

TEST(JoinedOperators, ListsThatAreChangedInPlaceAreRefused) {
  on_axis(2, [](const std::shared_ptr<Axis>& axis, int /*rank*/) {
    const auto refused = [](const char* name, const char* overload, torch::jit::Stack stack) {
      try {
        c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).callBoxed(stack);
        ADD_FAILURE() << name << ": changes that would be lost";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("cannot change lists of split tensors in place"));
      }
    };
    const std::vector<at::Tensor> list = {distribute(at::ones({4, 6}), axis, 1), at::ones({4})};
    refused("aten::_foreach_mul_", "Scalar", {list, at::Scalar(2)});
    refused("aten::split_copy", "Tensor_out", {at::ones({8, 6}), 4, 0, std::vector{list[0], list[0]}});
    refused("aten::unbind_copy", "int_out", {at::ones({2, 4, 6}), 0, std::vector{list[0], at::ones({4, 6})}});
  });
}

TEST(JoinedOperators, MemoryThatIsNotHereIsSaid) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    torch::nn::Linear layer(8, 6);
    const SplitModule split = parallelize_module(*layer, shared(communicator), {{.pattern = "weight"}});
    try {
      layer->weight.data_ptr();
      ADD_FAILURE() << "a pointer to memory that is not there";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("parameter weight is split over ranks"));
    }
    EXPECT_EQ(layer->weight.sizes(), (at::IntArrayRef{6, 8}));
    EXPECT_TRUE(layer->weight.requires_grad());
    EXPECT_EQ(split.leaves().size(), 2U);
    EXPECT_EQ(split.leaves()[0].sizes(), (at::IntArrayRef{3, 8}));
    EXPECT_THROW(parallelize_module(*layer, shared(communicator), {{.pattern = "weight"}}), UsageError);
  });
}

// A column layer's weight and what it computes: 4 columns of 6.
struct SplitLayer {
  explicit SplitLayer(comm::Communicator& communicator) {
    layer = made_alike<torch::nn::LinearImpl>([] { return std::make_shared<torch::nn::LinearImpl>(4, 6); });
    full = layer->weight.detach().clone();
    split = parallelize_module(*layer, shared(communicator), {{.pattern = ".*", .style = kColumn}});
    result = layer->forward(at::ones({2, 4}));
  }
  std::shared_ptr<torch::nn::LinearImpl> layer;
  at::Tensor full, result;
  SplitModule split;
};

template <class Body>
void expect_error(const char* what, const Body& body, const std::vector<std::string>& texts) {
  try {
    body();
    ADD_FAILURE() << what << ": expected an error";
  } catch (const std::exception& error) {
    for (const std::string& text : texts) EXPECT_THAT(error.what(), HasSubstr(text)) << what;
  }
}

TEST(JoinedOperators, ReadingTheMemoryOfAResultNamesItAndTheCallThatGathers) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const SplitLayer one(communicator);
    const std::vector<std::string> told = {"sizes [2, 6] is split over ranks", "ds::parallel::whole(tensor)"};
    expect_error(
        "data_ptr", [&] { one.result.data_ptr<float>(); }, told);
    expect_error(
        "const_data_ptr", [&] { one.result.const_data_ptr<float>(); }, told);
    expect_error(
        "accessor", [&] { one.result.accessor<float, 2>(); }, told);
    expect_error(
        "storage", [&] { static_cast<void>(one.result.storage()); }, told);
    expect_error("detach", [&] { one.layer->weight.detach().data_ptr(); }, {"sizes [6, 4]", "whole(tensor)"});
    std::ostringstream out;
    expect_error(
        "save", [&] { torch::save(one.result, out); }, told);
    expect_error("save a parameter", [&] { torch::save(one.layer->weight, out); }, {"parameter weight", "whole("});
    EXPECT_FLOAT_EQ(one.result[1][5].item<float>(), whole(one.result)[1][5].item<float>());
  });
}

TEST(JoinedOperators, WhatIsPrintedAndCopiedToBeReadIsTheWhole) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const SplitLayer one(communicator);
    const auto printed = [](const at::Tensor& tensor) {
      std::ostringstream out;
      out << tensor;
      return out.str();
    };
    const auto numbers = [](const std::string& text) { return text.substr(0, text.find("[ ")); };
    EXPECT_EQ(numbers(printed(one.layer->weight)), numbers(printed(one.full)));
    EXPECT_EQ(numbers(printed(one.result)), numbers(printed(whole(one.result))));
    const at::Tensor read = one.layer->weight.to(at::kCPU, at::kDouble);
    ASSERT_FALSE(is_split(read));
    EXPECT_EQ(read.const_data_ptr<double>()[23], one.full.data_ptr<float>()[23]);
    EXPECT_TRUE(is_split(one.result.to(at::kDouble))) << "a cast is no copy to be read";
    read.pow(2).sum().backward();
    EXPECT_EQ(relative_error(local_part(one.layer->weight).grad(), 2 * local_part(one.layer->weight)), 0);
    EXPECT_TRUE(one.split.joined_operators().empty());
  });
}

TEST(JoinedOperators, ASplitParameterIsGivenNoOtherMemory) {
  std::ostringstream saved;
  torch::save(std::make_shared<torch::nn::LinearImpl>(4, 6), saved);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const SplitLayer one(communicator);
    torch::nn::LinearImpl& layer = *one.layer;
    const std::vector<std::string> told = {"parameter weight", "model->to()",
                                           "before initialize() or parallelize_module()", "parameter.copy_(values)"};
    expect_error(
        "to", [&] { layer.to(at::kDouble); }, told);
    expect_error(
        "set_data",
        [&] {
          layer.weight.set_data(at::ones({6, 4}));
        },
        told);
    expect_error(
        "load",
        [&] {
          std::istringstream in(saved.str());
          torch::serialize::InputArchive archive;
          archive.load_from(in);
          layer.load(archive);
        },
        told);
    {
      const torch::NoGradGuard no_grad;
      const at::Tensor all = torch::nn::utils::parameters_to_vector(layer.parameters());
      expect_error(
          "vector_to_parameters", [&] { torch::nn::utils::vector_to_parameters(all, layer.parameters()); }, told);
      layer.weight.copy_(2 * one.full);
    }
    EXPECT_EQ(relative_error(whole(layer.weight), 2 * one.full), 0);
    EXPECT_TRUE(leaf_of(layer.weight).is_same(one.split.leaves()[0]));
  });
}

TEST(JoinedOperators, TwoModelsOverTheSameRanksMeet) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const SplitLayer one(communicator);
    const SplitLayer other(communicator);
    const at::Tensor loss = (one.result * other.result).sum();
    EXPECT_FLOAT_EQ(whole(loss).item<float>(), whole(one.result).pow(2).sum().item<float>());
    loss.backward();
    EXPECT_EQ(relative_error(one.split.leaves()[0].grad(), other.split.leaves()[0].grad()), 0);
    const auto others = communicator.new_group({0, 1}, "another");
    const at::Tensor apart = distribute(at::ones({2, 6}), make_axis(others), 1);
    expect_error("another group", [&] { static_cast<void>(one.result * apart); }, {"two axes", "ds::parallel::whole"});
  });
}

TEST(JoinedOperators, TheEngineRefusesASplitModuleByName) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    torch::nn::Linear layer(8, 6);
    parallelize_module(*layer, shared(communicator), {{.pattern = "weight"}});
    try {
      engine::collect_parameters(*layer);
      ADD_FAILURE() << "the engine would train parameters without memory";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("parameter weight is split over ranks"));
    }
  });
}

TEST(JoinedOperators, AnIndexOutOfRangeIsAnErrorOnEveryRank) {
  on_axis(2, [](const std::shared_ptr<Axis>& axis, int /*rank*/) {
    const at::Tensor table = distribute(at::randn({10, 4}), axis, 0);
    EXPECT_THROW(at::embedding(table, at::tensor({3, 10}, at::kLong)), c10::Error);
    EXPECT_THROW(at::embedding(table, at::tensor({-1}, at::kLong)), c10::Error);
    const at::Tensor scores = distribute(at::randn({2, 10}), axis, 1);
    EXPECT_THROW(at::cross_entropy_loss(scores, at::tensor({3, 10}, at::kLong)), c10::Error);
  });
}

}  // namespace
}  // namespace ds::parallel
