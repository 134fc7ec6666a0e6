// How long a checkpoint takes to write and to read, and how much of a step an asynchronous one takes.
//
//   ds-launch --num_procs 2 checkpoint_bench --config CONFIG --folder DIR [--layers 40] [--width 1024] [--rows 256]
//                                            [--rounds 3] [--load_only]
//
// The model: linear layers of width x width with tanh between them; the batch: `rows` per rank. Prints one line of JSON
// on rank 0: seconds of each save (until the checkpoint is published and on the disk), of each load, of plain steps,
// and of what an asynchronous save adds to the call and the steps beside it. --load_only: loads what another run left.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace {

using ds::engine::Engine;

struct Options {
  std::string config;
  std::string folder;
  int64_t layers = 40;
  int64_t width = 1024;
  int64_t rows = 256;
  int rounds = 3;
  bool load_only = false;
};

struct Stack : torch::nn::Module {
  explicit Stack(const Options& options) {
    for (int64_t i = 0; i < options.layers; ++i) {
      const at::Tensor steps = at::arange(options.width * options.width) + i;
      const at::Tensor values = at::sin(steps.to(at::kFloat)).mul_(0.05).view({options.width, options.width});
      weights.push_back(register_parameter("weight" + std::to_string(i), values));
    }
  }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = x;
    for (const at::Tensor& weight : weights) y = at::tanh(at::matmul(y, weight));
    return y.pow(2).mean();
  }
  std::vector<at::Tensor> weights;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds from when all ranks are there to when all are done.
template <class Action>
double seconds_of(Engine& engine, const Action& action) {
  engine.communicator().barrier("benchmark");
  const double begin = now();
  action();
  engine.communicator().barrier("benchmark");
  return now() - begin;
}

void run(const Options& options) {
  auto model = std::make_shared<Stack>(options);
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = options.config});
  const at::Tensor x = at::ones({options.rows, options.width});
  const auto step = [&] {
    engine->backward(model->forward(x));
    engine->step();
  };
  nlohmann::json result = {{"parameters", options.layers * options.width * options.width}};
  std::vector<double> saves, loads, steps, stalls;
  if (options.load_only) {
    for (int i = 0; i < options.rounds + 1; ++i) {
      loads.push_back(seconds_of(*engine, [&] { engine->load_checkpoint(options.folder); }));
    }
  } else {
    step();
    for (int i = 0; i < options.rounds + 1; ++i) {
      const std::string tag = "sync" + std::to_string(i);
      saves.push_back(seconds_of(*engine, [&] { engine->save_checkpoint(options.folder, tag, {.keep_last = 1}); }));
      loads.push_back(seconds_of(*engine, [&] { engine->load_checkpoint(options.folder, tag); }));
    }
    constexpr int kBeside = 3;  // steps
    for (int i = 0; i < options.rounds + 1; ++i) {
      const double plain = seconds_of(*engine, [&] {
        for (int s = 0; s < kBeside; ++s) step();
      });
      const double beside = seconds_of(*engine, [&] {
        engine->save_checkpoint(options.folder, "async" + std::to_string(i), {.asynchronous = true, .keep_last = 1});
        for (int s = 0; s < kBeside; ++s) step();
      });
      engine->wait_for_checkpoint();
      steps.push_back(plain / kBeside);
      stalls.push_back(beside - plain);
    }
  }
  // The first of each warms the page cache and the allocator.
  for (auto* list : {&saves, &loads, &steps, &stalls}) {
    if (!list->empty()) list->erase(list->begin());
  }
  result["save"] = saves;
  result["load"] = loads;
  result["step"] = steps;
  result["stall"] = stalls;
  if (engine->global_rank() == 0) std::cout << "RESULT " << result.dump() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options;
    CLI::App app("Times checkpoints.", "checkpoint_bench");
    app.add_option("--config", options.config, "ds_config")->required();
    app.add_option("--folder", options.folder, "save_dir")->required();
    app.add_option("--layers", options.layers)->capture_default_str();
    app.add_option("--width", options.width)->capture_default_str();
    app.add_option("--rows", options.rows)->capture_default_str();
    app.add_option("--rounds", options.rounds)->capture_default_str();
    app.add_flag("--load_only", options.load_only);
    app.add_option("--local_rank")->group("");
    CLI11_PARSE(app, argc, argv);
    run(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "checkpoint_bench: " << error.what() << '\n';
    return 1;
  }
}
