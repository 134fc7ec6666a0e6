// Measures a GPU, its host and the way between them; scripts/gpu_check runs it.
//
//   gpu_bench copies [--megabytes 1 16 256] [--rounds 9]
//   gpu_bench kernels [--values 268435456] [--rounds 9]
//   gpu_bench train --config FILE [--layers 20 --hidden 2048 --heads 16 --seq_len 1024 --batch 8] [--steps 6]
//
// `copies` times single copies between pinned (offload/pinned_arena) or pageable host memory and the device, the device
// being idle before and waited for after each; printed is the median of the rounds, in bytes a second.
// `kernels` times the codecs' kernels beside a copy on the device.
// `train` trains the example's GPT on random tokens with one rank. First --steps steps in which the device is waited
// for after forward, backward and step, which gives the time of each; then as many in which nothing waits, which gives
// the time of a step. Medians, one JSON object on stdout; with --profile also the kernels of two more steps.
// --bf16_start makes the model in bfloat16, for models whose float32 weights would not fit; weights are noise.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/gpu/kernel_profile.h"
#include "benchmarks/gpu/kernel_speed.h"
#include "comm/job/rank_device.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "dsengine/init_distributed.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "offload/pinned_arena.h"
#include "profiling/meters.h"

namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct Options {
  std::string device = "cuda";
  std::vector<int64_t> megabytes = {1, 16, 256};
  int rounds = 9;
  int64_t values = int64_t{1} << 28;
  std::string config;
  gpt::GptConfig model = {.layers = 20, .hidden = 2048, .heads = 16, .seq_len = 1024};
  int64_t batch = 8;
  int steps = 6;
  int warmup = 2;
  bool bf16_start = false;
  bool profile = false;
};

void wait_for(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

ordered_json time_copies(const Options& options, at::Device device) {
  ordered_json rows = ordered_json::array();
  for (const int64_t megabytes : options.megabytes) {
    const int64_t bytes = megabytes << 20;
    ds::offload::PinnedArena arena("copies", static_cast<size_t>(bytes), {.device = device});
    const at::Tensor pinned = arena.take(bytes, at::kByte);
    const at::Tensor pageable = at::zeros({bytes}, at::kByte);
    const at::Tensor there = at::zeros({bytes}, at::TensorOptions(device).dtype(at::kByte));
    for (const auto& [memory, host] : {std::pair("pinned", pinned), std::pair("pageable", pageable)}) {
      for (const bool to_device : {true, false}) {
        std::vector<double> seconds;
        for (int round = -2; round < options.rounds; ++round) {
          host.fill_(round & 127);
          if (!to_device) there.copy_(host);
          wait_for(device);
          const double taken = seconds_of([&] {
            (to_device ? there : host).copy_(to_device ? host : there, /*non_blocking=*/true);
            wait_for(device);
          });
          ds::ensure(there[bytes - 1].item<int>() == (round & 127) && host[0].item<int>() == (round & 127),
                     "a copy is one");
          if (round >= 0) seconds.push_back(taken);
        }
        rows.push_back({{"bytes", bytes},
                        {"memory", std::string(memory) == "pinned" && !arena.pinned() ? "not pinned" : memory},
                        {"to", to_device ? "device" : "host"},
                        {"bytes_per_second", static_cast<double>(bytes) / median(seconds)}});
      }
    }
  }
  return rows;
}

// The values do not matter, but must let a loss stay finite; drawing as many random numbers would take longer than the
// training.
std::shared_ptr<gpt::Gpt> quickly_made(const Options& options) {
  const auto before = torch::get_default_dtype();
  if (options.bf16_start) torch::set_default_dtype(c10::scalarTypeToTypeMeta(at::kBFloat16));
  const auto model = std::make_shared<gpt::Gpt>(options.model);
  torch::set_default_dtype(before);
  const torch::NoGradGuard no_grad;
  const at::Tensor noise = (at::rand({1 << 22}) - 0.5) * 0.07;
  for (const auto& item : model->named_parameters()) {
    const at::Tensor flat = item.value().view(-1);
    if (item.value().dim() == 1) {
      flat.fill_(item.key().find("ln") != std::string::npos && item.key().ends_with("weight") ? 1 : 0);
      continue;
    }
    for (int64_t begin = 0; begin < flat.numel(); begin += noise.numel()) {
      const int64_t count = std::min(noise.numel(), flat.numel() - begin);
      flat.narrow(0, begin, count).copy_(noise.narrow(0, 0, count));
    }
  }
  return model;
}

int64_t peak_of(const c10::CachingAllocator::StatArray& stats) { return stats[0].peak; }

// Seconds of the parts of each step, the device waited for after each.
struct Parts {
  std::vector<double> forward, backward, step;
};

ordered_json train(const Options& options, at::Device device) {
  const std::shared_ptr<gpt::Gpt> model = quickly_made(options);
  std::shared_ptr<ds::engine::Engine> engine;
  const double initialize_seconds = seconds_of([&] {
    engine = ds::engine::initialize({.model = model, .config = options.config, .device = options.device}).engine;
    wait_for(device);
  });
  const at::Tensor tokens = at::randint(options.model.vocab, {options.batch, options.model.seq_len + 1},
                                        at::TensorOptions(device).dtype(at::kLong));
  const at::Tensor data = tokens.narrow(1, 0, options.model.seq_len).contiguous();
  const at::Tensor target = tokens.narrow(1, 1, options.model.seq_len).contiguous();
  double first_loss = 0, last_loss = 0;
  Parts parts;
  for (int number = -options.warmup; number < options.steps; ++number) {
    at::Tensor loss;
    const double forward = seconds_of([&] { loss = model->forward(data, target), wait_for(device); });
    const double backward = seconds_of([&] { engine->backward(loss), wait_for(device); });
    const double step = seconds_of([&] { engine->step(), wait_for(device); });
    last_loss = loss.item<double>();
    if (number == -options.warmup) first_loss = last_loss;
    if (number < 0) continue;
    parts.forward.push_back(forward);
    parts.backward.push_back(backward);
    parts.step.push_back(step);
  }
  const auto steps_without_waits = [&](int steps) {
    for (int number = 0; number < steps; ++number) {
      engine->backward(model->forward(data, target));
      engine->step();
    }
    engine->synchronize_parameters();
    wait_for(device);
  };
  const double free_running = seconds_of([&] { steps_without_waits(options.steps); });
  ds::require<ds::Error>(std::isfinite(last_loss) && last_loss < first_loss, "expected the loss to fall, found ",
                         first_loss, " first and ", last_loss, " last");
  ordered_json result = {{"parameters", gpt::parameter_count(options.model)},
                         {"tokens_a_step", options.batch * options.model.seq_len},
                         {"initialize_seconds", initialize_seconds},
                         {"forward_seconds", median(parts.forward)},
                         {"backward_seconds", median(parts.backward)},
                         {"update_seconds", median(parts.step)},
                         {"step_seconds", free_running / options.steps},
                         {"first_loss", first_loss},
                         {"last_loss", last_loss},
                         {"model_state_bytes", engine->model_state_bytes().total()},
                         {"peak_resident_bytes", ds::profiling::peak_resident_bytes()}};
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    result["device_peak_allocated_bytes"] = peak_of(stats.allocated_bytes);
    result["device_peak_reserved_bytes"] = peak_of(stats.reserved_bytes);
    // Memory of all programs on the device, which is this one's where it is alone: context, kernels, libraries' own
    // memory.
    const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    result["device_bytes_beside_allocator"] = static_cast<int64_t>(total - free) - stats.reserved_bytes[0].current;
  }
  const auto speculation = engine->speculation();
  if (speculation.stood + speculation.rolled_back > 0) {
    result["speculation"] = {{"stood", speculation.stood}, {"rolled_back", speculation.rolled_back}};
  }
  if (options.profile) {
    constexpr int kProfiledSteps = 2;
    result["profile"] = ds::bench::profile_kernels([&] { steps_without_waits(kProfiledSteps); });
    result["profile"]["steps"] = kProfiledSteps;
  }
  return result;
}

void run(int argc, char** argv) {
  Options options;
  CLI::App app{"Measures a GPU, its host and the way between them", "gpu_bench"};
  app.option_defaults()->always_capture_default();
  app.require_subcommand(1);
  app.add_option("--device", options.device, "cuda or cuda:N; cpu only to try the program");
  CLI::App* const copies = app.add_subcommand("copies", "Bandwidth between host and device");
  copies->add_option("--megabytes", options.megabytes, "MiB of a copy")->check(CLI::PositiveNumber);
  copies->add_option("--rounds", options.rounds, "Copies of each kind")->check(CLI::PositiveNumber);
  CLI::App* const kernels = app.add_subcommand("kernels", "Speed of the codecs' kernels");
  kernels->add_option("--values", options.values, "Values that are encoded")->check(CLI::PositiveNumber);
  kernels->add_option("--rounds", options.rounds, "Timed runs of each kind")->check(CLI::PositiveNumber);
  CLI::App* const training = app.add_subcommand("train", "Steps of a GPT");
  training->add_option("--config", options.config, "A ds_config")->required();
  training->add_option("--layers", options.model.layers, "Blocks")->check(CLI::PositiveNumber);
  training->add_option("--hidden", options.model.hidden, "Channels")->check(CLI::PositiveNumber);
  training->add_option("--heads", options.model.heads, "Attention heads")->check(CLI::PositiveNumber);
  training->add_option("--seq_len", options.model.seq_len, "Tokens of a sequence")->check(CLI::PositiveNumber);
  training->add_option("--vocab", options.model.vocab, "Tokens there are")->check(CLI::PositiveNumber);
  training->add_option("--batch", options.batch, "Sequences of a step")->check(CLI::PositiveNumber);
  training->add_option("--steps", options.steps, "Timed steps of both kinds")->check(CLI::PositiveNumber);
  training->add_option("--warmup", options.warmup, "Steps before them")->check(CLI::PositiveNumber);
  training->add_flag("--bf16_start", options.bf16_start, "Make the model in bfloat16");
  training->add_flag("--profile", options.profile, "Which kernels the time of two more steps goes to");
  training->add_flag("--activation_checkpointing", options.model.activation_checkpointing, "Recompute blocks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  const at::Device device = ds::engine::device_of_rank(options.device, 0);
  ordered_json result;
  if (app.got_subcommand(copies)) {
    result["copies"] = time_copies(options, device);
  } else if (app.got_subcommand(kernels)) {
    result["kernels"] = ds::bench::kernel_speeds(device, options.values, options.rounds);
  } else {
    result = train(options, device);
  }
  std::cout << result.dump() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "gpu_bench: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
