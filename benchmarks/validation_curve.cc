// Trains the example's GPT on one rank as a ds_config says, and writes what training took until which loss on text that
// it does not train on; with --small also what the small model of compression_training is. Started by
// data_efficiency/compare.py and model_compression/compare.py.
//
//   validation_curve --config FILE --text FILE --validation FILE --steps N [--every N] [--seed N]
//                    [--until LOSS --at_most N] [--small] --out FILE
//
// Writes {"curve": [{"step", "tokens", "seconds", "loss"}, ...]} and, of the small model, "whole_bytes", "small_bytes"
// and "small_loss". Seconds are those of training alone.
#include <dsengine/efficiency.h>
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <dsengine/model_compression.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>

#include "benchmarks/paired_timing.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "examples/gpt/token_batches.h"

namespace {

struct Options {
  std::string config, text, validation, out;
  int64_t steps = 400;
  int64_t at_most = 0;
  int64_t every = 20;
  uint64_t seed = 1;
  std::optional<double> until;
  bool small = false;
};

constexpr int64_t kValidationBatch = 8;
constexpr int64_t kValidationBatches = 4;

// The mean loss of the same sequences each time.
double validate(const gpt::Gpt& model, gpt::TokenBatches& batches) {
  const torch::NoGradGuard no_gradient;
  double sum = 0;
  for (int64_t i = 0; i < kValidationBatches; ++i) {
    const gpt::TokenBatch batch = batches.get(i * kValidationBatch);
    sum += model.forward(batch.data, batch.target).item<double>();
  }
  return sum / kValidationBatches;
}

nlohmann::json curve_of(const Options& options, const std::shared_ptr<ds::engine::Engine>& engine, gpt::Gpt& model,
                        gpt::TokenBatches& batches, gpt::TokenBatches& held_out) {
  nlohmann::json curve = nlohmann::json::array();
  double seconds = 0;
  int64_t tokens = 0;
  bool goes_on = true;
  while (goes_on) {
    seconds += ds::benchmarks::seconds([&] {
      const gpt::TokenBatch batch = batches.get(engine->global_samples());
      tokens += batch.data.numel();
      engine->backward(model.forward(batch.data, batch.target));
      engine->step();
    });
    if (engine->global_steps() % options.every != 0) continue;
    engine->eval();
    const double loss = validate(model, held_out);
    engine->train();
    curve.push_back({{"step", engine->global_steps()}, {"tokens", tokens}, {"seconds", seconds}, {"loss", loss}});
    const bool waits = options.until && loss > *options.until;
    goes_on = engine->global_steps() < (waits ? std::max(options.at_most, options.steps) : options.steps);
  }
  return curve;
}

void add_small_model(nlohmann::json& result, const std::shared_ptr<ds::engine::Engine>& engine,
                     gpt::TokenBatches& held_out) {
  const auto small = std::make_shared<gpt::Gpt>(gpt::GptConfig());
  int64_t whole_bytes = 0;
  for (const at::Tensor& parameter : small->parameters()) whole_bytes += static_cast<int64_t>(parameter.nbytes());
  const auto tensors = ds::engine::redundancy_clean(engine);
  int64_t small_bytes = 0;
  for (const auto& [name, tensor] : tensors) small_bytes += static_cast<int64_t>(tensor.nbytes());
  ds::engine::load_small_model(*small, tensors);
  result["whole_bytes"] = whole_bytes;
  result["small_bytes"] = small_bytes;
  result["small_loss"] = validate(*small, held_out);
}

void run(const Options& options) {
  const gpt::GptConfig size;
  const auto model = std::make_shared<gpt::Gpt>(size);
  gpt::initialize_weights(*model, options.seed);
  const auto engine = ds::engine::initialize({.model = model, .config = options.config, .device = "cpu"}).engine;
  model->leave_out({ds::engine::progressive_layer_drop(engine), ds::engine::random_ltd(engine),
                    ds::engine::sparse_self_attention(engine, size.heads)});
  gpt::TextCorpus text = gpt::TextCorpus::open(options.text);
  gpt::TextCorpus validation = gpt::TextCorpus::open(options.validation);
  gpt::TokenBatches batches(text, {.batch_size = engine->train_micro_batch_size_per_gpu(),
                                   .seq_len = size.seq_len,
                                   .seed = options.seed,
                                   .curriculum = ds::engine::curriculum(engine)});
  gpt::TokenBatches held_out(validation, {.batch_size = kValidationBatch, .seq_len = size.seq_len});
  nlohmann::json result = {{"curve", curve_of(options, engine, *model, batches, held_out)}};
  if (options.small) add_small_model(result, engine, held_out);
  std::ofstream(options.out) << result.dump() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Loss on held-out text against the time and the tokens of training");
  Options options;
  app.add_option("--config", options.config, "a ds_config")->required();
  app.add_option("--text", options.text)->required();
  app.add_option("--validation", options.validation, "another text")->required();
  app.add_option("--out", options.out)->required();
  app.add_option("--steps", options.steps, "a multiple of --every")->check(CLI::PositiveNumber);
  app.add_option("--every", options.every, "steps between two validations")->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed, "of weights and batches");
  app.add_option("--until", options.until, "goes on beyond --steps until the loss is there");
  app.add_option("--at_most", options.at_most, "steps with --until");
  app.add_flag("--small", options.small, "the small model that compression_training leaves, too");
  CLI11_PARSE(app, argc, argv);
  try {
    if (options.steps % options.every != 0) throw std::invalid_argument("expected --steps to be a multiple of --every");
    at::set_num_threads(1);
    run(options);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "validation_curve: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
