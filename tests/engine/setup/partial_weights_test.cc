// Files of weights that lack some of the model, have other shapes, or are adapters alone: .weights_options,
// save_weights() and load_weights().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr int64_t kHidden = 16;
constexpr int64_t kInputs = 6;  // of sample()

// Frozen, with two trained matrices beside it.
struct AdaptedLinear : torch::nn::Module {
  AdaptedLinear(int64_t inputs, int64_t outputs, at::Device device) {
    const auto options = torch::TensorOptions().device(device);
    weight = register_parameter("weight", torch::empty({outputs, inputs}, options), /*requires_grad=*/false);
    lora_a = register_parameter("lora_a", torch::empty({2, inputs}, options));
    lora_b = register_parameter("lora_b", torch::empty({outputs, 2}, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(x, weight) + torch::linear(torch::linear(x, lora_a), lora_b);
  }
  at::Tensor weight, lora_a, lora_b;
};

// `scale`: other values of a formula; on the meta device there are none.
struct AdaptedNetImpl : torch::nn::Module {
  explicit AdaptedNetImpl(double scale = 1.0, at::Device device = at::kCPU) {
    first = register_module("first", std::make_shared<AdaptedLinear>(kInputs, kHidden, device));
    last = register_module("last", std::make_shared<AdaptedLinear>(kHidden, 3, device));
    if (device.is_meta()) return;
    fill(*this);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) parameter.mul_(scale);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->lora_a.scalar_type());
    return (last->forward(torch::tanh(first->forward(typed))) - typed.narrow(1, 0, 3)).pow(2).mean();
  }
  std::shared_ptr<AdaptedLinear> first, last;
};
TORCH_MODULE(AdaptedNet);

const char* const kAdapters[] = {"first.lora_a", "first.lora_b", "last.lora_a", "last.lora_b"};

bool is_adapter(const std::string& name) { return name.find("lora_") != std::string::npos; }

// Three elements each that depend on the generator.
void draw(const std::string& name, const at::Tensor& values) {
  values.normal_(0, name.ends_with("lora_b") ? 0.01 : 0.1);
}

enum class Made { kWhole, kSliced, kMeta };

// What a rank gives initialize(); other ranks than 0 have other values.
struct Given {
  Given(comm::Communicator& ranks, Made way, int stage) : communicator(borrowed(ranks)) {
    if (way == Made::kSliced) init.emplace(communicator, zero::InitOptions{.max_live = 40, .smallest = 8});
    model =
        AdaptedNet(ranks.rank() == 0 ? 1.0 : 7.0, way == Made::kMeta ? at::Device(at::kMeta) : at::Device(at::kCPU));
    options = {.model = model.ptr(), .config = small_config(stage, 1), .init = init ? &*init : nullptr};
    if (!init) options.communicator = communicator;
    options.weights_options.strict = false;
    if (way == Made::kMeta) options.weights_options.fill = draw;
  }
  std::shared_ptr<comm::Communicator> communicator;
  std::optional<zero::Init> init;
  AdaptedNet model{nullptr};
  InitializeOptions options;
};

class PartialWeights : public ::testing::TestWithParam<int> {
 protected:
  // The base of a net, whose values are twice those of the formula.
  std::string base() const {
    const AdaptedNet net(2.0);
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& item : net->named_parameters()) {
      if (!is_adapter(item.key())) tensors.emplace_back(item.key(), item.value());
    }
    return write("base.safetensors", tensors);
  }
  std::string write(const std::string& name, const std::vector<std::pair<std::string, at::Tensor>>& tensors) const {
    checkpoint::write_weights(folder_ / name, tensors);
    return folder_ / name;
  }
  test::ScratchFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Stages, PartialWeights, ::testing::Range(0, 4),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(PartialWeights, WhatTheFileLacksStartsAsTheProgramMakesIt) {
  const std::string path = base();
  const State twice = parameters_of(*AdaptedNet(2.0));
  const State once = parameters_of(*AdaptedNet());
  std::map<std::string, at::Tensor> drawn;  // on the meta device, by one rank
  for (const int world : {1, 2}) {
    for (const Made way : {Made::kWhole, Made::kSliced, Made::kMeta}) {
      test::run_ranks(world, [&](comm::Communicator& ranks) {
        Given given(ranks, way, GetParam());
        given.options.weights = ranks.rank() == 0 ? path : "/nowhere";
        const auto engine = initialize(given.options).engine;
        EXPECT_THAT(engine->start_weights().missing, ::testing::ElementsAreArray(kAdapters));
        EXPECT_THAT(engine->start_weights().unused, IsEmpty());
        const State found = copy_of(engine->module_state_dict());
        for (const auto& [name, values] : found) {
          if (!is_adapter(name)) {
            EXPECT_TRUE(values.equal(twice.at(name))) << name;
          } else if (way != Made::kMeta) {
            EXPECT_TRUE(values.equal(once.at(name))) << name;
          } else if (world == 1) {
            EXPECT_GT(values.std().item<double>(), 0.0) << name;
            drawn[name] = values;
          } else {
            EXPECT_TRUE(values.equal(drawn.at(name))) << name;
          }
        }
        engine->backward(given.model->loss(sample(0, ranks.rank())));
        engine->step();
      });
    }
  }
  EXPECT_FALSE(drawn.at("first.lora_b").narrow(0, 0, 3).equal(drawn.at("last.lora_b")));
}

TEST_P(PartialWeights, ErrorsSayWhatIsMissingAndTheWayOut) {
  const std::string path = base();
  const auto refused = [&](Made way, const std::function<void(WeightsOptions&)>& change, const auto& matcher,
                           int world = 2) {
    test::run_ranks(world, [&](comm::Communicator& ranks) {
      Given given(ranks, way, GetParam());
      given.options.weights = path;
      change(given.options.weights_options);
      try {
        initialize(given.options);
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.what()), matcher);  // whichever rank ends last
      }
    });
  };
  for (const Made way : {Made::kWhole, Made::kSliced, Made::kMeta}) {
    refused(
        way, [](WeightsOptions& options) { options.strict = true; },
        AllOf(HasSubstr("has no tensor \"first.lora_a\", nor the 3 more \"first.lora_b\", \"last.lora_a\""),
              HasSubstr(".weights_options = {.strict = false}")));
  }
  refused(
      Made::kMeta, [](WeightsOptions& options) { options.fill = nullptr; },
      AllOf(HasSubstr("does not have all of 4 tensors on the meta device"), HasSubstr("first.lora_a"),
            HasSubstr("Pass .weights_options.fill")));
  refused(
      Made::kMeta, [](WeightsOptions& options) { options.fill = [](const auto&, const at::Tensor&) {}; },
      AllOf(HasSubstr(".weights_options.fill: first.lora_a: expected values"), HasSubstr("found NaN afterwards")),
      /*world=*/1);
  const std::string foreign = write("foreign.safetensors", {{"other", torch::ones({2})}});
  refused(
      Made::kWhole, [&](WeightsOptions& options) { options.over = {foreign}; },
      AllOf(HasSubstr(".weights_options.over: "), HasSubstr("foreign.safetensors has no tensor of the model"),
            HasSubstr(".weights_options.rename")));
  refused(
      Made::kWhole, [](WeightsOptions& options) { options.grow = {"wte*"}; },
      HasSubstr(".weights_options.grow: \"wte*\": expected the name of a parameter"));
}

TEST(PartialWeightsOptions, NeedAFileAndAgreement) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    Given given(ranks, Made::kWhole, 1);
    EXPECT_THAT([&] { initialize(given.options); },
                ThrowsMessage<UsageError>(HasSubstr("expected .weights, the file")));
    given.options.weights = "/nowhere";
    given.options.weights_options.strict = ranks.rank() == 0;
    EXPECT_THAT([&] { initialize(given.options); }, ThrowsMessage<CommError>(HasSubstr(".weights_options.strict")));
  });
}

// 5 of 8 rows are the file's; of a name in the file that is another, and a head that is left out.
TEST_P(PartialWeights, TablesGrowAndNamesAreMapped) {
  const at::Tensor rows = torch::full({5, kInputs}, 0.25);
  const AdaptedNet other(3.0);
  const std::string path = write("grown.safetensors", {{"base.first.weight", rows},
                                                       {"base.first.lora_a", other->first->lora_a},
                                                       {"base.first.lora_b", other->first->lora_b.narrow(0, 0, 10)},
                                                       {"base.last.lora_a", other->last->lora_a},
                                                       {"base.last.lora_b", other->last->lora_b},
                                                       {"base.last.weight", torch::ones({9, kHidden})},
                                                       {"more", rows}});
  const State once = parameters_of(*AdaptedNet());
  for (const Made way : {Made::kWhole, Made::kSliced, Made::kMeta}) {
    for (const bool grows : {false, true}) {
      test::run_ranks(2, [&](comm::Communicator& ranks) {
        Given given(ranks, way, GetParam());
        given.options.weights = path;
        given.options.weights_options.strict = true;
        given.options.weights_options.rename = [](const std::string& name) {
          return name == "last.weight" ? std::string() : cat("base.", name);
        };
        if (!grows) {
          EXPECT_THROW(
              {
                try {
                  initialize(given.options);
                } catch (const UsageError& error) {
                  EXPECT_THAT(error.what(), AllOf(HasSubstr("expected shape [16, 6], found [5, 6]"),
                                                  HasSubstr(".weights_options.grow = {\"first.weight\"}")));
                  throw;
                }
              },
              Error);
          return;
        }
        given.options.weights_options.grow = {"first.w*", "*.lora_b"};
        const auto engine = initialize(given.options).engine;
        EXPECT_THAT(engine->start_weights().grown, ElementsAre("first.weight", "first.lora_b"));
        EXPECT_THAT(engine->start_weights().missing, ElementsAre("last.weight"));
        EXPECT_THAT(engine->start_weights().unused, ElementsAre("base.last.weight", "more"));
        const State found = copy_of(engine->module_state_dict());
        EXPECT_TRUE(found.at("first.weight").narrow(0, 0, 5).equal(rows));
        EXPECT_TRUE(found.at("last.lora_b").equal(other->last->lora_b));
        const at::Tensor grown = found.at("first.lora_b");
        EXPECT_TRUE(grown.narrow(0, 0, 10).equal(other->first->lora_b.narrow(0, 0, 10)));
        const at::Tensor behind = found.at("first.weight").narrow(0, 5, kHidden - 5);
        if (way == Made::kMeta) {
          EXPECT_FALSE(behind.isnan().any().item<bool>());
          EXPECT_GT(found.at("last.weight").std().item<double>(), 0.0);
        } else {
          EXPECT_TRUE(grown.narrow(0, 10, 6).equal(once.at("first.lora_b").narrow(0, 10, 6)));
          EXPECT_TRUE(behind.equal(once.at("first.weight").narrow(0, 5, kHidden - 5)));
          EXPECT_TRUE(found.at("last.weight").equal(once.at("last.weight")));
        }
      });
    }
  }
}

void train_adapters(Engine& engine, AdaptedNet& model) {
  for (int64_t step = 0; step < 3; ++step) {
    engine.backward(model->loss(sample(step, engine.communicator().rank())));
    engine.step();
  }
}

// Base from a file, new adapters, training; the adapters alone come back over the base, at the start and later.
TEST_P(PartialWeights, AdaptersAreSavedAndLoadedAlone) {
  const std::string path = base();
  for (const bool bf16 : {false, true}) {
    for (const Made way : {Made::kWhole, Made::kSliced, Made::kMeta}) {
      ordered_json config = small_config(GetParam(), 1);
      if (bf16) config["bf16"]["enabled"] = true;
      const std::string adapters = folder_ / "new/adapters.safetensors";
      State trained;
      test::run_ranks(2, [&](comm::Communicator& ranks) {
        Given given(ranks, way, GetParam());
        given.options.config = config;
        given.options.weights = path;
        const auto engine = initialize(given.options).engine;
        train_adapters(*engine, given.model);
        EXPECT_EQ(engine->save_weights(adapters), adapters);
        EXPECT_THAT([&] { engine->save_weights(folder_ / "none", {.names = {"*.lora_c"}}); },
                    ThrowsMessage<UsageError>(HasSubstr("\"*.lora_c\": expected the name of a parameter or buffer")));
        engine->save_weights(folder_ / "narrow", {.names = {"first.lora_*", "last.weight"}, .masters = false});
        const State state = copy_of(engine->fp32_state_dict());
        if (ranks.rank() == 0) trained = state;
      });
      const SafetensorsFile file(adapters);
      EXPECT_EQ(file.entries().size(), 4U);
      for (const char* name : kAdapters) EXPECT_TRUE(file.tensor(name).equal(trained.at(name))) << name;
      const SafetensorsFile narrow(folder_ / "narrow");
      EXPECT_EQ(narrow.entries().size(), 3U);
      EXPECT_EQ(narrow.tensor("last.weight").scalar_type(), bf16 ? at::kBFloat16 : at::kFloat);

      test::run_ranks(3, [&](comm::Communicator& ranks) {  // at the start
        Given given(ranks, way, GetParam());
        given.options.config = config;
        given.options.weights = path;
        given.options.weights_options = {.over = {adapters}};
        const auto engine = initialize(given.options).engine;
        EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), trained), 0.0);
      });
      test::run_ranks(2, [&](comm::Communicator& ranks) {  // later
        Given given(ranks, way, GetParam());
        given.options.config = config;
        given.options.weights = path;
        const auto engine = initialize(given.options).engine;
        train_adapters(*engine, given.model);
        const WeightsReport report = engine->load_weights(adapters);
        EXPECT_THAT(report.missing, ElementsAre("first.weight", "last.weight"));
        EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), trained), 0.0);
        const at::Tensor loss = given.model->loss(sample(0, 0));
        EXPECT_FALSE(loss.isnan().item<bool>());
        train_adapters(*engine, given.model);
      });
    }
  }
}

TEST_P(PartialWeights, LoadedWeightsHaveToBeTheModels) {
  const std::string more =
      write("more.safetensors", {{"last.lora_b", torch::ones({3, 2})}, {"first.x", torch::ones({2})}});
  const std::string none = write("none.safetensors", {{"first.x", torch::ones({2})}});
  const std::string shape = write("shape.safetensors", {{"last.lora_b", torch::ones({4, 2})}});
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    AdaptedNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), ranks).engine;
    const State before = copy_of(engine->fp32_state_dict());
    EXPECT_THAT([&] { engine->load_weights(more); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("1 tensors that the model does not have: first.x"), HasSubstr("strict = false"))));
    EXPECT_THAT([&] { engine->load_weights(none, /*strict=*/false); },
                ThrowsMessage<UsageError>(HasSubstr("Expected some of the model's tensors, such as first.lora_a")));
    EXPECT_THAT([&] { engine->load_weights(shape); }, ThrowsMessage<UsageError>(HasSubstr("[4, 2]")));
    EXPECT_THROW(engine->load_weights("/nowhere.safetensors"), IoError);
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    EXPECT_THAT(engine->load_weights(more, /*strict=*/false).unused, ElementsAre("first.x"));
    EXPECT_TRUE(copy_of(engine->fp32_state_dict()).at("last.lora_b").equal(torch::ones({3, 2})));
    engine->backward(model->loss(sample(0, ranks.rank())));
    EXPECT_THAT([&] { engine->load_weights(more); },
                ThrowsMessage<UsageError>(HasSubstr("load_weights() was called between backward() and step()")));
  });
}

// Parts of a tensor axis: whole, sliced, on the meta device; a base, new adapters, a grown matrix.
TEST_P(PartialWeights, OverATensorAxis) {
  const std::string path = write("axis.safetensors", {{"first.weight", torch::full({10, kInputs}, 0.25)},
                                                      {"last.weight", AdaptedNet(2.0)->last->weight}});
  const State once = parameters_of(*AdaptedNet());
  State drawn;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    Given given(ranks, Made::kMeta, 0);
    given.options.weights = path;
    given.options.weights_options.grow = {"first.weight"};
    drawn = copy_of(initialize(given.options).engine->module_state_dict());
  });
  for (const Made way : {Made::kWhole, Made::kSliced, Made::kMeta}) {
    const std::string adapters = folder_ / "adapters.safetensors";
    State trained;
    for (const bool again : {false, true}) {
      test::run_ranks(4, [&](comm::Communicator& world) {
        Given given(world, way, GetParam());
        ordered_json config = small_config(GetParam(), 1);
        config["tensor_parallel"] = {{"autotp_size", 2}};
        config["log_level"] = "error";
        given.options.config = config;
        given.options.split = {{"first.weight", parallel::Style::kColumn}, {"first.lora_b", parallel::Style::kColumn}};
        given.options.weights = path;
        given.options.weights_options.grow = {"first.weight"};
        if (again) given.options.weights_options.over = {adapters};
        const auto engine = initialize(given.options).engine;
        const State found = copy_of(engine->fp32_state_dict());
        if (again) {
          EXPECT_EQ(largest_difference(found, trained), 0.0);
          return;
        }
        for (const auto& [name, values] : found) {
          EXPECT_TRUE(name == "last.weight" ||
                      values.equal(way == Made::kMeta ? drawn.at(name)
                                   : name == "first.weight"
                                       ? torch::cat({torch::full({10, kInputs}, 0.25), once.at(name).narrow(0, 10, 6)})
                                       : once.at(name)))
              << name;
        }
        train_adapters(*engine, given.model);
        engine->save_weights(adapters);
        const State state = copy_of(engine->fp32_state_dict());
        if (world.rank() == 0) trained = state;
      });
    }
    EXPECT_EQ(SafetensorsFile(adapters).entries().size(), 4U);
  }
}

// Layers of a pipeline, of which each stage has its own.
struct StageImpl : torch::nn::Module {
  explicit StageImpl(int64_t outputs) : inner(std::make_shared<AdaptedLinear>(kInputs, outputs, at::kCPU)) {
    register_module("inner", inner);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(inner->forward(x)); }
  std::shared_ptr<AdaptedLinear> inner;
};
TORCH_MODULE(Stage);

TEST_P(PartialWeights, OverAPipeline) {
  const std::string path = write("stages.safetensors", {{"one.inner.weight", torch::full({kInputs, kInputs}, 0.25)},
                                                        {"two.inner.weight", torch::full({kInputs, kInputs}, 0.5)},
                                                        {"three.inner.weight", torch::ones({1})}});
  const std::string adapters = write("two.safetensors", {{"two.inner.lora_a", torch::full({2, kInputs}, 0.75)}});
  test::run_ranks(4, [&](comm::Communicator& world) {
    std::vector<pipeline::LayerSpec> layers = {pipeline::LayerSpec::of<Stage>(kInputs).named("one"),
                                               pipeline::LayerSpec::of<Stage>(kInputs).named("two")};
    const auto loss = [](const at::Tensor& found, const at::Tensor& target) { return (found - target).pow(2).mean(); };
    const auto model = std::make_shared<pipeline::PipelineModule>(layers, pipeline::PipelineOptions{.loss = loss});
    ordered_json config = small_config(GetParam(), 2);
    config["pipeline"] = {{"stages", 2}};
    config["log_level"] = "error";
    const auto engine = initialize({.model = model,
                                    .config = config,
                                    .weights = path,
                                    .weights_options = {.strict = false},
                                    .communicator = borrowed(world)})
                            .engine;
    EXPECT_THAT(engine->start_weights().missing,
                ElementsAre("one.inner.lora_a", "one.inner.lora_b", "two.inner.lora_a", "two.inner.lora_b"));
    EXPECT_THAT(engine->start_weights().unused, ElementsAre("three.inner.weight"));
    engine->load_weights(adapters);
    const SafetensorsFile saved(engine->save_weights(folder_ / "all.safetensors"));
    EXPECT_EQ(saved.entries().size(), 4U);  // what is trained, of both stages
    EXPECT_TRUE(saved.contains("one.inner.lora_a") && saved.contains("two.inner.lora_b"));
    EXPECT_TRUE(saved.tensor("two.inner.lora_a").equal(torch::full({2, kInputs}, 0.75)));
    for (const auto& [name, values] : engine->module_state_dict()) {
      if (name == "one.inner.weight") EXPECT_EQ(values.mean().item<double>(), 0.25);
      if (name == "two.inner.weight") EXPECT_EQ(values.mean().item<double>(), 0.5);
      if (name == "two.inner.lora_a") EXPECT_EQ(values.mean().item<double>(), 0.75);
      if (name == "one.inner.lora_a") EXPECT_NE(values.mean().item<double>(), 0.75);
    }
  });
}

}  // namespace
}  // namespace ds::engine
