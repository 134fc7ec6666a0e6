#include "gpt_options.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>

#include "check.h"
#include "gpt2_names.h"

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
  app.add_flag("--tanh_gelu", model.tanh_gelu, "GELU's tanh approximation, as GPT-2's; otherwise exact")
      ->group("Model");
  app.add_flag("--freeze_embeddings", model.freeze_embeddings,
               "Do not train the token and position embeddings, nor a head tied to them")
      ->group("Model");
  app.add_flag("--activation_checkpointing", model.activation_checkpointing,
               "Blocks keep their input only and are computed again in backward: less memory, more time")
      ->group("Model");
  app.add_flag("--fused_norms", model.fused_norms,
               "Blocks add the attention's output and normalize in one operator, which is faster on a GPU")
      ->group("Model");
  app.add_flag("--whole_logits", model.whole_logits,
               "The loss from all logits at once, as plain LibTorch; otherwise in chunks, which saves their memory")
      ->group("Model");
}

void add_run_options(CLI::App& app, GptOptions& options) {
  const std::map<std::string, Order> orders = {{"random", Order::kRandom}, {"sequential", Order::kSequential}};
  app.add_option("--deepspeed_config", options.deepspeed_config, "The ds_config JSON file (examples in configs/)")
      ->required();
  app.add_option("--data", options.data,
                 "A text file, or a folder of them (its first 32 MiB); default: the environment variable DS_GPT_DATA, "
                 "else the prose that comes with this program");
  app.add_option("--steps", options.steps, "Optimizer steps in all, those before a loaded checkpoint included")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--init", options.init, "Start from these weights (safetensors) instead of the seed's");
  app.add_option("--save", options.save, "Write the float32 weights to this safetensors file at the end");
  app.add_option(
      "--export_hf", options.export_hf,
      "Write the float32 weights and a config.json at the end to this folder, as a GPT-2 that Hugging Face's "
      "transformers loads");
  app.add_option("--order", options.order, "Where sequences start in the text: random or sequential")
      ->transform(CLI::CheckedTransformer(orders))
      ->option_text("random|sequential [random]");
  app.add_option("--metrics", options.metrics,
                 "Write one JSON object a line for each step, and a summary, to this file");
  app.add_option("--generate", options.generate, "Print this many bytes of sampled text at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "Of initial weights, random order and sampling");
  app.add_option("--device", options.device, "auto, cpu or cuda; auto: cuda where there is a GPU [auto]")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

// Flags for the values that a ds_config may leave to its program.
void add_auto_options(CLI::App& app, ds::engine::config::AutoValues& values) {
  const char* group = "For what the ds_config leaves \"auto\"";
  app.add_option("--micro_batch", values.train_micro_batch_size_per_gpu, "Sequences in one forward of one rank")
      ->check(CLI::PositiveNumber)
      ->group(group);
  app.add_option("--accumulation", values.gradient_accumulation_steps, "Forwards in one optimizer step")
      ->check(CLI::PositiveNumber)
      ->group(group);
  app.add_option("--lr", values.lr, "Learning rate")->check(CLI::NonNegativeNumber)->group(group);
  app.add_option("--weight_decay", values.weight_decay)->check(CLI::NonNegativeNumber)->group(group);
  app.add_option("--clipping", values.gradient_clipping, "Limit of the gradient's norm; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->group(group);
  app.add_option("--warmup_steps", values.warmup_num_steps, "Steps of warm-up; those in all are --steps")
      ->check(CLI::NonNegativeNumber)
      ->group(group);
  app.add_option("--bf16", values.bf16, "true or false")->group(group);
  app.add_option("--fp16", values.fp16, "true or false")->group(group);
}

void add_checkpoint_options(CLI::App& app, GptOptions& options) {
  CLI::Option* save = app.add_option("--save_checkpoint", options.save_checkpoint,
                                     "Save all state of the run to this folder, after the last step at least")
                          ->group("Checkpoints");
  app.add_option("--save_interval", options.save_interval, "Save after every so many steps; 0: only after the last")
      ->check(CLI::NonNegativeNumber)
      ->needs(save)
      ->group("Checkpoints");
  app.add_option("--keep_checkpoints", options.keep_checkpoints,
                 "Keep the latest so many, remove older ones; 0: all [checkpoint.keep_last of the ds_config]")
      ->check(CLI::NonNegativeNumber)
      ->needs(save)
      ->group("Checkpoints");
  app.add_option(
         "--load_checkpoint", options.load_checkpoint,
         "Go on from the latest checkpoint in this folder, with any number of ranks and ZeRO stage; starts anew "
         "where there is none")
      ->group("Checkpoints");
}

void add_pipeline_options(CLI::App& app, GptOptions& options) {
  CLI::Option* stages =
      app.add_option(
             "--pipeline_stages", options.pipeline_stages,
             "Cut the model into stages on so many ranks each; micro-batches are the gradient accumulation steps")
          ->check(CLI::PositiveNumber)
          ->group("Pipeline");
  app.add_option(
         "--pipeline_schedule", options.pipeline_schedule,
         "gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, dualpipev or a .csv file of actions [pipeline.schedule of "
         "the ds_config]")
      ->needs(stages)
      ->group("Pipeline");
  app.add_option(
         "--pipeline_trace", options.pipeline_trace,
         "Write when each action of the last step began and ended to this file, for ds-tool schedule --measured")
      ->needs(stages)
      ->group("Pipeline");
  // These flags need all weights on one rank.
  for (const char* whole : {"--save", "--export_hf"}) stages->excludes(app.get_option(whole));
}

// --load_hf and what it decides.
void add_hf_option(CLI::App& app, GptOptions& options) {
  CLI::Option* load = app.add_option("--load_hf", options.load_hf,
                                     "Start from the GPT-2 in this folder (config.json and safetensors weights, as "
                                     "Hugging Face keeps them), which decides the model; --seq_len may be shorter")
                          ->group("Model");
  for (const char* decided : {"--layers", "--hidden", "--heads", "--vocab", "--tie_embeddings", "--tanh_gelu", "--init",
                              "--pipeline_stages"}) {
    load->excludes(app.get_option(decided));
  }
}

// Sets the options that follow from several flags together.
void complete(GptOptions& options, bool seq_len_given) {
  options.seq_len = options.model.seq_len;
  if (!options.load_hf) return;
  GptConfig model = read_gpt2_config(*options.load_hf);
  if (!seq_len_given) options.seq_len = model.seq_len;
  require<ds::ConfigError>(options.seq_len <= model.seq_len, "--seq_len ", options.seq_len, " is beyond the ",
                           model.seq_len, " positions of ", *options.load_hf);
  model.freeze_embeddings = options.model.freeze_embeddings;
  model.activation_checkpointing = options.model.activation_checkpointing;
  model.fused_norms = options.model.fused_norms;
  model.whole_logits = options.model.whole_logits;
  options.model = model;
}

// The values above that no flag gives: what the run knows anyway.
void complete_auto(GptOptions& options) {
  options.auto_values.total_num_steps = options.steps;
  options.auto_values.hidden_size = options.model.hidden;
}

}  // namespace

std::optional<GptOptions> parse_options(int argc, const char* const* argv) {
  GptOptions options;
  int ignored_rank = 0;
  bool ignored_flag = false;
  CLI::App app{"Trains a byte-level GPT on text with dsengine", "gpt"};
  app.option_defaults()->always_capture_default();
  add_run_options(app, options);
  add_auto_options(app, options.auto_values);
  add_model_options(app, options.model);
  add_checkpoint_options(app, options);
  add_pipeline_options(app, options);
  add_hf_option(app, options);
  app.add_option("--local_rank,--local-rank", ignored_rank, "Taken and ignored: the environment says it")->group("");
  app.add_flag("--deepspeed", ignored_flag, "Taken and ignored")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw ds::ConfigError(cat(error.what(), "; --help lists the options"));
  }
  complete(options, app.count("--seq_len") > 0);
  complete_auto(options);
  return options;
}

}  // namespace gpt
