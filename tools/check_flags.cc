#include <cstdint>
#include <iostream>
#include <memory>

#include "launcher/command_line/number_flags.h"
#include "tools/check_command.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"

namespace ds::tool {

void add_check(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* flags = app.add_subcommand(
      "check", "Resolves a ds_config: values, plan and bytes per rank. Exit code 0: it runs; 2: it does not.");
  flags->add_option("config", options->config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  flags->add_option("--world_size", options->world_size, "Number of ranks")
      ->transform(whole_number(1, kMostRanks))
      ->capture_default_str()
      ->type_name("N");
  flags->add_option("--parameters", options->parameters, "Trainable elements of the model")
      ->transform(whole_number(1, kMostParameters))
      ->type_name("N");
  flags
      ->add_option("--split_parameters", options->split_parameters,
                   "The model's parameters, in place of their number, and what tensor_parallel cuts of them: a "
                   ".safetensors file, a folder of such, or JSON {\"name\": [sizes], ...}")
      ->type_name("FILE");
  flags->add_option("--tokens", options->tokens, "Tokens of a micro-batch on one rank, for what a tensor axis sends")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N");
  flags
      ->add_option("--activation_bytes", options->activation_bytes,
                   "Bytes of activations of a micro-batch on one rank, as a run with memory_breakdown reports them")
      ->transform(whole_number(0, kMostBytes))
      ->type_name("N");
  flags
      ->add_option("--auto", options->auto_values,
                   "What the program gives for an \"auto\", as lr=1e-4, optimizer.params.lr=1e-4 or hidden_size=4096; "
                   "repeatable. The rest is assumed, as Hugging Face's trainer without arguments")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  flags->add_flag("--strict", options->strict, "Unknown keys are errors");
  flags->add_flag("--explain", options->explain, "Say of each key of the file what it does, and what holds without it");
  flags->add_flag("--json", options->json, "Print one JSON object, every key with its value");
  flags->callback([options, &chosen] { chosen = [options] { return check(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
