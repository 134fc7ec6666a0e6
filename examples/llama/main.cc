// Fine-tunes a model of the Llama family that Hugging Face's libraries have written, whole or by LoRA, and writes what
// these libraries load.
//
//   llama new --config config.json --out DIR         a model with start values
//   llama train --model DIR --deepspeed_config ds_config.json --data TEXT [--lora_rank 8] --export DIR
//   llama merge --model DIR --adapter DIR --out DIR  the adapter added to the weights; unmerge takes it out
//
// Ranks, ZeRO stage, precision, offload, the tensor axis and the pipeline stand in the ds_config.
#include <dsengine/engine.h>
#include <dsengine/errors.h>
#include <dsengine/initialize.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "hf_folder.h"
#include "llama_model.h"
#include "token_file.h"

namespace llama {
namespace {

struct Options {
  std::string model, adapter, out, data, config, checkpoint, device;
  std::string new_config;
  int64_t seq_len = 128;
  int64_t steps = 100;
  uint64_t seed = 1234;
  int64_t lora_rank = 0;  // 0: all weights are trained, unless there is an adapter
  double lora_alpha = 16.0;
  double lora_dropout = 0.0;
  std::vector<std::string> lora_targets = {"all-linear"};
  bool recompute = false;
};

Build build_of(const Options& options) {
  Build build{.config = read_config(options.model), .device = at::kMeta, .recompute = options.recompute};
  if (!options.adapter.empty()) {
    build.lora = read_lora(build.config, options.adapter);
  } else if (options.lora_rank > 0) {
    build.lora = LoraConfig{.rank = options.lora_rank,
                            .alpha = options.lora_alpha,
                            .dropout = options.lora_dropout,
                            .targets = find_targets(build.config, options.lora_targets)};
  }
  return build;
}

void print_start(const Options& options, const Build& build, ds::engine::Engine& engine, int64_t tokens) {
  if (engine.global_rank() != 0) return;
  std::cout << options.model << ": " << build.config.layers << " layers of " << build.config.hidden << ", "
            << (build.lora ? "LoRA of rank " + std::to_string(build.lora->rank) + " on " +
                                 std::to_string(build.lora->targets.size()) + " layers"
                           : std::string("all weights trained"))
            << "; " << engine.world_size() << " ranks, ZeRO stage " << engine.zero_optimization_stage() << ", "
            << engine.train_batch_size() << " sequences a step; text of " << tokens << " tokens" << std::endl;
}

void print_step(ds::engine::Engine& engine, const Options& options, const at::Tensor& loss) {
  const int64_t step = engine.global_steps();
  if (engine.global_rank() == 0 && (step % 10 == 0 || step == 1 || step == options.steps)) {
    std::cout << "step " << step << "  loss " << loss.item<double>() << std::endl;
  }
}

// Trains epoch after epoch, up to --steps in all.
void train_steps(ds::engine::Engine& engine, ds::engine::DataLoader& loader, const CausalLm& model,
                 const Options& options) {
  while (engine.global_steps() < options.steps) {
    for (auto& batch : loader) {
      const int64_t before = engine.global_steps();
      const at::Tensor loss = model.forward(batch.data, batch.target);
      engine.backward(loss);
      engine.step();
      if (engine.global_steps() > before) print_step(engine, options, engine.mean(loss.detach()));
      if (engine.global_steps() >= options.steps) return;
    }
  }
}

void train(const Options& options) {
  const Build build = build_of(options);
  const TokenFile data(options.data, options.seq_len, build.config.vocab);
  std::shared_ptr<CausalLm> model;
  ds::engine::InitializeOptions initial{.config = options.config, .training_data = data, .device = options.device};
  const bool pipelined = read_json(options.config).value(nlohmann::json::json_pointer("/pipeline/stages"), 1) != 1;
  if (pipelined) {
    initial.model = make_pipeline(build);
  } else {
    initial.model = model = std::make_shared<CausalLm>(build);
  }
  set_weights(initial, build, options.model, options.adapter);
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize(initial);
  print_start(options, build, *engine, data.tokens());
  if (!options.checkpoint.empty()) engine->load_checkpoint(options.checkpoint);
  if (pipelined) {
    while (engine->global_steps() < options.steps) print_step(*engine, options, engine->train_batch());
  } else {
    train_steps(*engine, *loader, *model, options);
  }
  if (!options.checkpoint.empty()) engine->save_checkpoint(options.checkpoint);
  if (options.out.empty()) return;
  if (build.lora) {
    export_adapter(*engine, *build.lora, options.model, options.out);
  } else {
    export_model(*engine, options.model, options.out);
  }
  if (engine->global_rank() == 0) std::cout << "wrote " << options.out << std::endl;
}

void add_train(CLI::App& app, Options& options) {
  CLI::App* train_command = app.add_subcommand("train", "Fine-tunes a model");
  train_command->add_option("--model", options.model, "A folder of Hugging Face: config.json and safetensors")
      ->required()
      ->check(CLI::ExistingDirectory);
  train_command->add_option("--deepspeed_config", options.config, "The ds_config JSON file")
      ->required()
      ->check(CLI::ExistingFile);
  train_command->add_option("--data", options.data, "Text, whose bytes are tokens, or 16-bit ids in a file *.bin")
      ->required()
      ->check(CLI::ExistingFile);
  train_command->add_option("--seq_len", options.seq_len, "Tokens of a sequence")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  train_command->add_option("--steps", options.steps, "Steps in all, those before a checkpoint included")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI::Option* rank = train_command->add_option("--lora_rank", options.lora_rank, "Trains adapters of this rank alone")
                          ->check(CLI::PositiveNumber);
  train_command->add_option("--lora_alpha", options.lora_alpha, "Their products are scaled by alpha / rank")
      ->needs(rank)
      ->capture_default_str();
  train_command->add_option("--lora_dropout", options.lora_dropout, "The dropout of their inputs")
      ->needs(rank)
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();
  train_command->add_option("--lora_targets", options.lora_targets, "Layers with adapters: q_proj v_proj ...")
      ->needs(rank)
      ->capture_default_str();
  train_command->add_option("--adapter", options.adapter, "Goes on with the adapters of this folder of PEFT")
      ->check(CLI::ExistingDirectory)
      ->excludes(rank);
  train_command->add_flag("--activation_checkpointing", options.recompute,
                          "Each layer keeps its input alone, and is computed again in backward");
  train_command->add_option("--checkpoint", options.checkpoint,
                            "Goes on from the latest one there, and saves at the end");
  train_command->add_option("--export", options.out, "A folder for transformers, or with adapters for PEFT");
  train_command->add_option("--device", options.device, "auto, cpu or cuda");
  train_command->callback([&options] { train(options); });
}

void add_new(CLI::App& app, Options& options) {
  CLI::App* make = app.add_subcommand("new", "Writes a model with start values");
  make->add_option("--config", options.new_config, "The config.json")->required()->check(CLI::ExistingFile);
  make->add_option("--out", options.out, "The folder to write")->required();
  make->add_option("--seed", options.seed, "Of the random numbers")->capture_default_str();
  make->callback([&options] { write_new(options.new_config, options.out, options.seed); });
}

void add_merge(CLI::App& app, Options& options, const char* name, const char* what, Merge way) {
  CLI::App* merge = app.add_subcommand(name, what);
  merge->add_option("--model", options.model, "The folder of the weights")->required()->check(CLI::ExistingDirectory);
  merge->add_option("--adapter", options.adapter, "The folder of the adapter")
      ->required()
      ->check(CLI::ExistingDirectory);
  merge->add_option("--out", options.out, "The folder to write")->required();
  merge->callback([&options, way] { merge_adapter(options.model, options.adapter, options.out, way); });
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  CLI::App app("Fine-tunes models of the Llama family", "llama");
  app.require_subcommand(1);
  llama::Options options;
  llama::add_new(app, options);
  llama::add_train(app, options);
  llama::add_merge(app, options, "merge", "Adds an adapter to the weights", llama::Merge::kAdd);
  llama::add_merge(app, options, "unmerge", "Takes an adapter out of the weights again", llama::Merge::kTakeOut);
  try {
    CLI11_PARSE(app, argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "llama: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
