#include <cstdint>
#include <iostream>
#include <memory>

#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"
#include "tools/simulate_command.h"

namespace ds::tool {
namespace {

constexpr const char* kSimulated =
    R"(Modelled: the schedule's actions on every rank of a pipeline, each stage's operations over --tflops (or measured
times), messages between stages beside them, collectives of ZeRO as rings, beside backward and the first forward where the
config says so; sums over ranks that share layers (tensor_parallel), which computing waits for; ranks of a node share its
link. Rank = (pipeline rank x data-parallel ranks + data-parallel rank) x tensor ranks + tensor rank. Memory:
model state, what is gathered, activations that the schedule holds at once, messages. Activations of a block:
34 s b h + 5 a s^2 b bytes at 16 bits (arXiv:2205.05198).
Not modelled: other speeds of other kernels, other users of links, stragglers, reading data, the norm, the update
(--update_ms), copies and updates of offloaded state, the two levels of quantized gradients, stage3_max_reuse_distance,
workspaces. Compressed gradients are refused.)";

void add_simulated_model(CLI::App& simulate, SimulateOptions& options) {
  constexpr const char* kGpt = "Model: a GPT ...";
  simulate.add_option("--layers", options.layers, "Blocks; or equal layers of a model given by sums")
      ->transform(whole_number(1, kMostLayers))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--hidden", options.hidden, "Width")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--heads", options.heads, "Attention heads")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--seq_len", options.seq_len, "Tokens of a sample")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_option("--vocab", options.vocab, "Tokens there are")
      ->transform(whole_number(1, kMostWidth))
      ->type_name("N")
      ->group(kGpt);
  simulate.add_flag("--tied", options.tied, "The head has the weights of the embedding")->group(kGpt);
  simulate.add_flag("--flash_attention", options.flash_attention, "Attention keeps no scores")->group(kGpt);
  constexpr const char* kSums = "... or sums of any";
  simulate.add_option("--parameters", options.parameters, "Trainable elements")
      ->transform(whole_number(1, kMostParameters))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--flops", options.flops, "Operations of forward, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--activation_bytes", options.activation_bytes, "Kept for backward, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate.add_option("--message_bytes", options.message_bytes, "What a stage sends the next, of a micro-batch")
      ->check(real_number(0))
      ->type_name("N")
      ->group(kSums);
  simulate
      .add_flag("--activation_checkpointing", options.activation_checkpointing,
                "Layers keep their input only (else pipeline.activation_checkpoint_interval)")
      ->group("Model");
}

void add_simulated_machine(CLI::App& simulate, SimulateOptions& options) {
  constexpr const char* kMachine = "Machine";
  simulate.add_option("--tflops", options.tflops, "10^12 operations a second, of a rank, as achieved")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--link_gbps", options.link_gbps, "10^9 bits a second that a node sends to others [--node_gbps]")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate
      .add_option("--node_gbps", options.node_gbps, "10^9 bits a second that a rank sends in its node [--link_gbps]")
      ->check(real_number(0, true))
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--ranks_per_node", options.ranks_per_node, "Consecutive ranks of a node")
      ->transform(whole_number(1, kMostRanks))
      ->capture_default_str()
      ->type_name("N")
      ->group(kMachine);
  simulate.add_option("--latency_us", options.latency_us, "Microseconds of a message of no length")
      ->check(real_number(0))
      ->capture_default_str()
      ->type_name("X")
      ->group(kMachine);
  simulate.add_option("--memory_gib", options.memory_gib, "Memory of a rank; names those that need more")
      ->type_name("X")
      ->group(kMachine);
  constexpr const char* kMeasured = "Measured, milliseconds; one number, or one for each stage (1.5,2)";
  simulate.add_option("--forward_ms", options.forward_ms, "Forward of a micro-batch")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--backward_input_ms", options.backward_input_ms, "Backward, gradients of the input")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--backward_weight_ms", options.backward_weight_ms, "Backward, gradients of the weights")
      ->type_name("X,..")
      ->group(kMeasured);
  simulate.add_option("--message_ms", options.message_ms, "A message between stages")
      ->check(real_number(0))
      ->type_name("X")
      ->group(kMeasured);
  simulate.add_option("--update_ms", options.update_ms, "Norm and optimizer, once a step")
      ->check(real_number(0))
      ->type_name("X")
      ->group(kMeasured);
}

}  // namespace

void add_simulate(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<SimulateOptions>();
  CLI::App* flags = app.add_subcommand("simulate",
                                       "Predicts a step of thousands of ranks: time, bubble, bytes sent and memory. "
                                       "Exit code 0: done; 1: ranks need more "
                                       "than --memory_gib; 2: the config or an option is wrong.");
  flags->footer(kSimulated);
  flags->add_option("config", options->config, "The ds_config: a file, or url-safe base64 of JSON")
      ->required()
      ->type_name("CONFIG");
  flags->add_option("--ranks", options->ranks, "Ranks of the job; pipeline.stages of them make a pipeline")
      ->transform(whole_number(1, kMostSimulatedRanks))
      ->capture_default_str()
      ->type_name("N");
  add_simulated_model(*flags, *options);
  add_simulated_machine(*flags, *options);
  flags->add_flag("--per_rank", options->per_rank, "Print every rank of a pipeline, not the fullest alone");
  flags->add_flag("--strict", options->strict, "Unknown keys of the config are errors");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->callback([options, &chosen] { chosen = [options] { return simulate(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
