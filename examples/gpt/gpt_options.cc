#include "examples/gpt/gpt_options.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>

#include "core/check.h"

namespace gpt {
namespace {

void add_model_options(CLI::App& app, GptConfig& model) {
  app.add_option("--layers", model.layers, "Transformer blocks")->check(CLI::PositiveNumber)->group("Model");
  app.add_option("--hidden", model.hidden, "Channels; divisible by heads")->check(CLI::PositiveNumber)->group("Model");
  app.add_option("--heads", model.heads, "Attention heads")->check(CLI::PositiveNumber)->group("Model");
  app.add_option("--seq_len", model.seq_len, "Tokens of one sequence")->check(CLI::PositiveNumber)->group("Model");
  app.add_option("--vocab", model.vocab, "Tokens; bytes are tokens, so 256 takes any text")
      ->check(CLI::PositiveNumber)
      ->group("Model");
  app.add_flag("--tie_embeddings", model.tie_embeddings, "The head uses the token embedding's weight")->group("Model");
  app.add_flag("--freeze_embeddings", model.freeze_embeddings,
               "Do not train the token and position embeddings, nor a head tied to them")
      ->group("Model");
  app.add_flag("--activation_checkpointing", model.activation_checkpointing,
               "Blocks keep their input only and are computed again in backward: less memory, more time")
      ->group("Model");
}

void add_run_options(CLI::App& app, GptOptions& options) {
  const std::map<std::string, Order> orders = {{"random", Order::kRandom}, {"sequential", Order::kSequential}};
  app.add_option("--deepspeed_config", options.deepspeed_config, "The ds_config JSON file (examples in configs/)")
      ->required();
  app.add_option("--data", options.data,
                 "A text file, or a folder of them (its first 32 MiB); default: the environment variable DS_GPT_DATA, "
                 "else the C++ "
                 "headers of LibTorch");
  app.add_option("--steps", options.steps, "Optimizer steps")->check(CLI::NonNegativeNumber);
  app.add_option("--init", options.init, "Start from these weights (safetensors) instead of the seed's");
  app.add_option("--save", options.save, "Write the float32 weights to this safetensors file at the end");
  app.add_option("--order", options.order, "Where sequences start in the text: random or sequential")
      ->transform(CLI::CheckedTransformer(orders))
      ->option_text("random|sequential [random]");
  app.add_option("--metrics", options.metrics,
                 "Write one JSON object a line for each step, and a summary, to this file");
  app.add_option("--generate", options.generate, "Print this many bytes of sampled text at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "Of initial weights, random order and sampling");
  app.add_option("--device", options.device, "cpu or cuda [cpu]")->check(CLI::IsMember({"cpu", "cuda"}));
}

}  // namespace

std::optional<GptOptions> parse_options(int argc, const char* const* argv) {
  GptOptions options;
  int ignored_rank = 0;
  bool ignored_flag = false;
  CLI::App app{"Trains a byte-level GPT on text with dsengine", "gpt"};
  app.option_defaults()->always_capture_default();
  add_run_options(app, options);
  add_model_options(app, options.model);
  app.add_option("--local_rank,--local-rank", ignored_rank, "Taken and ignored: the environment says it")->group("");
  app.add_flag("--deepspeed", ignored_flag, "Taken and ignored")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw ds::ConfigError(ds::cat(error.what(), "; --help lists the options"));
  }
  return options;
}

}  // namespace gpt
