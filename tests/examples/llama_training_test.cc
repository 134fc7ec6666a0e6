// Fine-tuning with the engine: the losses of transformers and PEFT with torch's AdamW, step by step, in every layout;
// what is exported; and which memory a frozen base holds at stage 3.
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/checkpoint.h"
#include "dsengine/engine.h"
#include "examples/llama/hf_folder.h"
#include "examples/llama/llama_model.h"
#include "tests/examples/llama_fixture.h"
#include "tests/support/borrowed.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace llama {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

constexpr int64_t kBatch = 4;
constexpr int64_t kTime = 12;
constexpr int64_t kVocab = 48;
constexpr int64_t kMostLive = 4000;  // elements that are gathered at a time at stage 3

std::vector<double> expected_losses(const std::string& family, bool lora) {
  return read_json(fixture("curves.json")).at(family).at(lora ? "lora" : "full");
}

// The tokens of a step, [kBatch, kTime + 1], as llama_fixture.py makes them.
at::Tensor tokens_of(int64_t step) {
  const at::Tensor row = torch::arange(kBatch, torch::kLong).unsqueeze(1) + kBatch * step;
  const at::Tensor column = torch::arange(kTime + 1, torch::kLong).unsqueeze(0);
  return (row * row * 7 + column * column * 5 + row * column * 3).remainder(kVocab);
}

enum class Made { kMeta, kSliced };

struct TrainingRun {
  std::string name;
  std::string family;
  bool lora = false;
  int stage = 0;
  int data_ranks = 1;
  int tensor_ranks = 1;
  int stages = 1;
  Made made = Made::kMeta;
  bool recompute = false;
  bool offload = false;
  size_t steps = 50;
  double bound = 5e-6;  // of a loss, for each step
  int ranks() const { return data_ranks * tensor_ranks * stages; }
};

ordered_json config_of(const TrainingRun& run) {
  ordered_json zero = {{"stage", run.stage}, {"stage3_gather_16bit_weights_on_model_save", true}};
  if (run.stage == 3) {
    zero["stage3_param_persistence_threshold"] = 0;
    zero["stage3_max_reuse_distance"] = 0;
    zero["stage3_prefetch_bucket_size"] = 0;
    zero["stage3_max_live_parameters"] = kMostLive;
    zero["reduce_bucket_size"] = 1000;
  }
  if (run.offload) zero["offload_optimizer"] = {{"device", "cpu"}};
  const int64_t micro_batches = run.stages > 1 ? 2 : 1;
  ordered_json config = {{"train_micro_batch_size_per_gpu", kBatch / run.data_ranks / micro_batches},
                         {"gradient_accumulation_steps", micro_batches},
                         {"gradient_clipping", 0.0},
                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.1}}}}},
                         {"zero_optimization", zero}};
  if (run.tensor_ranks > 1) config["tensor_parallel"] = {{"autotp_size", run.tensor_ranks}};
  if (run.stages > 1) config["pipeline"] = {{"stages", run.stages}};
  return config;
}

// One rank's model, engine and what they need.
struct Trained {
  Trained(const TrainingRun& run, ds::comm::Communicator& ranks, const std::string& folder,
          const std::string& adapter) {
    communicator = ds::test::borrowed(ranks);
    if (run.made == Made::kSliced) init.emplace(communicator, ds::zero::InitOptions{.max_live = 600, .smallest = 8});
    Build build{.config = read_config(folder),
                .device = run.made == Made::kMeta ? at::kMeta : at::kCPU,
                .recompute = run.recompute};
    if (run.lora) build.lora = read_lora(build.config, fixture(run.family) + "/adapter");
    ds::engine::InitializeOptions options{.config = config_of(run), .init = init ? &*init : nullptr};
    if (!init) options.communicator = communicator;
    if (run.stages > 1) {
      options.model = make_pipeline(build);
    } else {
      options.model = model = std::make_shared<CausalLm>(build);
    }
    set_weights(options, build, folder, adapter);
    engine = ds::engine::initialize(options).engine;
  }

  // Runs a step and returns its mean loss.
  double step(const TrainingRun& run, int64_t number) const {
    const at::Tensor tokens = tokens_of(number);
    if (run.stages > 1) {
      int64_t micro = 0;
      const auto loss = engine->train_batch([&] {
        const at::Tensor own = tokens.narrow(0, 2 * micro++, 2);
        return ds::pipeline::MicroBatch{.inputs = {own.narrow(1, 0, kTime)}, .labels = {own.narrow(1, 1, kTime)}};
      });
      return loss.item<double>();
    }
    const int64_t size = kBatch / run.data_ranks;
    const at::Tensor own = tokens.narrow(0, engine->communicator().rank() * size, size);
    const at::Tensor loss = model->forward(own.narrow(1, 0, kTime), own.narrow(1, 1, kTime));
    engine->backward(loss);
    engine->step();
    return engine->mean(loss.detach()).item<double>();
  }

  std::shared_ptr<ds::comm::Communicator> communicator;
  std::optional<ds::zero::Init> init;
  std::shared_ptr<CausalLm> model;
  std::shared_ptr<ds::engine::Engine> engine;
};

std::string adapter_of(const TrainingRun& run) { return run.lora ? fixture(run.family) + "/adapter" : ""; }

class LlamaCurves : public testing::TestWithParam<TrainingRun> {};
INSTANTIATE_TEST_SUITE_P(
    Layouts, LlamaCurves,
    testing::Values(
        TrainingRun{.name = "full_llama", .family = "llama"},
        TrainingRun{.name = "full_mistral_stage1", .family = "mistral", .stage = 1, .data_ranks = 2},
        TrainingRun{
            .name = "full_qwen2_stage2_offload", .family = "qwen2", .stage = 2, .data_ranks = 2, .offload = true},
        // The norms of queries and keys magnify rounding: up to 6e-6 at the first steps, and no more at the last ones.
        TrainingRun{.name = "full_qwen3_stage3",
                    .family = "qwen3",
                    .stage = 3,
                    .data_ranks = 2,
                    .recompute = true,
                    .bound = 7.5e-6},
        TrainingRun{.name = "full_llama_init",
                    .family = "llama",
                    .stage = 3,
                    .data_ranks = 2,
                    .made = Made::kSliced,
                    .steps = 15},
        TrainingRun{.name = "full_qwen3_tensor", .family = "qwen3", .tensor_ranks = 2, .steps = 15},
        TrainingRun{.name = "full_qwen2_pipeline", .family = "qwen2", .stages = 2, .steps = 15},
        TrainingRun{.name = "lora_mistral", .family = "mistral", .lora = true},
        TrainingRun{.name = "lora_qwen2_stage1", .family = "qwen2", .lora = true, .stage = 1, .data_ranks = 2},
        TrainingRun{.name = "lora_qwen3_stage2", .family = "qwen3", .lora = true, .stage = 2, .data_ranks = 2},
        TrainingRun{.name = "lora_llama_stage3",
                    .family = "llama",
                    .lora = true,
                    .stage = 3,
                    .data_ranks = 2,
                    .recompute = true},
        TrainingRun{.name = "lora_qwen3_init",
                    .family = "qwen3",
                    .lora = true,
                    .stage = 3,
                    .data_ranks = 2,
                    .made = Made::kSliced,
                    .steps = 15},
        TrainingRun{.name = "lora_llama_tensor", .family = "llama", .lora = true, .tensor_ranks = 2, .steps = 15},
        TrainingRun{.name = "lora_mistral_pipeline", .family = "mistral", .lora = true, .stages = 2, .steps = 15}),
    [](const auto& run) { return run.param.name; });

TEST_P(LlamaCurves, AreThoseOfTransformersAndTorch) {
  const TrainingRun& run = GetParam();
  const std::vector<double> expected = expected_losses(run.family, run.lora);
  ASSERT_EQ(expected.size(), 50U);
  ds::test::run_ranks(run.ranks(), [&](ds::comm::Communicator& ranks) {
    const Trained trained(run, ranks, fixture(run.family), adapter_of(run));
    for (size_t step = 0; step < run.steps; ++step) {
      ASSERT_NEAR(trained.step(run, static_cast<int64_t>(step)), expected[step], run.bound) << "step " << step;
    }
  });
}

// The bytes of memory that parameters have, trained ones or frozen ones, each block of memory once.
int64_t bytes_of(const torch::nn::Module& model, bool trained) {
  int64_t bytes = 0;
  std::set<const void*> seen;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.requires_grad() != trained) continue;
    c10::StorageImpl* const storage = parameter.storage().unsafeGetStorageImpl();
    if (!seen.insert(storage).second) continue;
    if (storage->_mutable_data_ptr_no_checks().get() == nullptr) continue;  // released: it keeps its size alone
    bytes += static_cast<int64_t>(storage->nbytes());
  }
  return bytes;
}

// The frozen weights are read in forward, again in the recomputation, and for the gradients of activations. No gradient
// of theirs arrives, after which they could be released: the limit of live parameters holds for them, and the update
// releases what is left.
TEST(LlamaStage3, FrozenShardsAreReleasedWithinTheStep) {
  const TrainingRun run{.name = "", .family = "llama", .lora = true, .stage = 3, .data_ranks = 2, .recompute = true};
  ds::test::run_ranks(2, [&](ds::comm::Communicator& ranks) {
    const Trained trained(run, ranks, fixture("llama"), adapter_of(run));
    const CausalLm& model = *trained.model;
    int64_t elements = 0;
    const auto base = ds::checkpoint::open_weights(fixture("llama"));
    for (const auto& entry : base->tensors()) elements += entry.second.numel();
    for (int64_t step = 0; step < 3; ++step) {
      const at::Tensor tokens = tokens_of(step).narrow(0, 2 * ranks.rank(), 2);
      const at::Tensor loss = model.forward(tokens.narrow(1, 0, kTime), tokens.narrow(1, 1, kTime));
      trained.engine->backward(loss);
      EXPECT_LE(bytes_of(model, /*trained=*/false), 4 * kMostLive) << "after backward of step " << step;
      trained.engine->step();
      EXPECT_EQ(bytes_of(model, /*trained=*/false), 0) << "after step " << step;
      const int64_t gathered = trained.engine->model_state_bytes().gathered;
      EXPECT_GT(gathered, 0) << "frozen weights were gathered";
      EXPECT_LT(gathered, 4 * elements) << "and never all of them at once";
    }
    std::vector<at::Tensor> frozen;
    for (const at::Tensor& parameter : model.parameters()) {
      if (!parameter.requires_grad()) frozen.push_back(parameter);
    }
    const auto whole = trained.engine->gathered_parameters(frozen);
    EXPECT_GE(bytes_of(model, /*trained=*/false), 4 * elements) << "the count must see memory where there is some";
  });
}

TEST(LlamaExport, WholeModelsGoInAndOutUnchanged) {
  for (const std::string& family : std::vector<std::string>{"llama", "qwen2"}) {
    const ds::test::ScratchFolder scratch;
    const TrainingRun run{.name = "", .family = family, .stage = 3, .data_ranks = 2};
    ds::test::run_ranks(2, [&](ds::comm::Communicator& ranks) {
      const Trained trained(run, ranks, fixture(family), "");
      export_model(*trained.engine, fixture(family), scratch / "out");
    });
    const auto before = ds::checkpoint::open_weights(fixture(family));
    const auto after = ds::checkpoint::open_weights(scratch / "out");
    ASSERT_EQ(after->tensors().size(), before->tensors().size()) << family;
    for (const auto& entry : before->tensors()) {
      EXPECT_TRUE(torch::equal(after->tensor(entry.first), before->tensor(entry.first))) << entry.first;
    }
    EXPECT_EQ(read_json(scratch / "out/config.json"), read_json(fixture(family) + "/config.json"));
  }
}

TEST(LlamaExport, AdaptersGoInAndOutUnchanged) {
  const ds::test::ScratchFolder scratch;
  const TrainingRun run{.name = "", .family = "qwen3", .lora = true, .stage = 3, .data_ranks = 2};
  const std::string adapter = adapter_of(run);
  const LlamaConfig config = read_config(fixture("qwen3"));
  ds::test::run_ranks(2, [&](ds::comm::Communicator& ranks) {
    const Trained trained(run, ranks, fixture("qwen3"), adapter);
    export_adapter(*trained.engine, read_lora(config, adapter), fixture("qwen3"), scratch / "out");
  });
  const ds::SafetensorsFile before(adapter_file(adapter));
  const ds::SafetensorsFile after(adapter_file(scratch / "out"));
  ASSERT_EQ(after.entries().size(), before.entries().size());
  for (const auto& entry : before.entries()) {
    EXPECT_TRUE(torch::equal(after.tensor(entry.name), before.tensor(entry.name))) << entry.name;
  }
  const LoraConfig lora = read_lora(config, scratch / "out");
  EXPECT_EQ(lora.targets, read_lora(config, adapter).targets);
  EXPECT_EQ(lora.rank, 2);
  EXPECT_EQ(lora.alpha, 6.0);
}

TEST(LlamaExport, NewAdaptersChangeNothingAndMissingWeightsAreNamed) {
  const ds::test::ScratchFolder scratch;
  const TrainingRun run{.name = "", .family = "qwen3", .lora = true, .stage = 3, .data_ranks = 2};
  const ds::SafetensorsFile expected(fixture("qwen3") + "/expected.safetensors");
  ds::test::run_ranks(2, [&](ds::comm::Communicator& ranks) {
    const Trained trained(run, ranks, fixture("qwen3"), "");
    const at::NoGradGuard no_grad;
    const at::Tensor logits = trained.model->logits(expected.tensor("tokens"));
    EXPECT_LT((logits - expected.tensor("logits")).abs().max().item<double>(), 1e-5);
  });
  std::filesystem::copy(fixture("qwen3") + "/config.json", scratch / "config.json");
  const ds::SafetensorsFile original(fixture("qwen3") + "/model.safetensors");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& entry : original.entries()) {
    if (entry.name != "model.norm.weight") tensors.emplace_back(entry.name, original.tensor(entry.name));
  }
  ds::write_safetensors(scratch / "model.safetensors", tensors);
  const TrainingRun alone{.name = "", .family = "qwen3", .lora = true};
  const auto start = [&] {
    ds::test::run_ranks(
        1, [&](ds::comm::Communicator& ranks) { const Trained trained(alone, ranks, scratch.path().string(), ""); });
  };
  try {
    start();
    ADD_FAILURE() << "a model without model.norm.weight was trained";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("model.norm.weight"));
  }
}

}  // namespace
}  // namespace llama
