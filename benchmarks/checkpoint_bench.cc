// How long a checkpoint takes to write and to read, or what training loses to one that is saved beside it.
//
//   ds-launch --num_procs 2 checkpoint_bench --config CONFIG --folder DIR [--layers 40] [--width 1024] [--rows 256]
//                                            [--rounds 3] [--load_only | --beside STEPS]
//
// The model: linear layers of width x width with tanh between them; the batch: `rows` per rank. Prints one line of JSON
// on rank 0, all in seconds. Without more: each save (until the checkpoint is published and, unless the config says
// otherwise, on the disk) and each load. --load_only: loads what another run left. --beside: blocks of so many steps,
// by turns plain, after a synchronous save and after an asynchronous one; a list for each block: the call, then the
// steps.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/engine.h"

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
  int beside = 0;
};

struct Stack : torch::nn::Module {
  explicit Stack(const Options& options) {
    // The start values of torch.nn.Linear: numbers so small that they are denormal would slow the steps down.
    at::manual_seed(1);
    const double bound = 1 / std::sqrt(static_cast<double>(options.width));
    for (int64_t i = 0; i < options.layers; ++i) {
      const at::Tensor values = at::empty({options.width, options.width}).uniform_(-bound, bound);
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

// Outside of what is timed, as for the peers.
void remove_tag(Engine& engine, const Options& options, const std::string& tag) {
  if (engine.global_rank() == 0) std::filesystem::remove_all(std::filesystem::path(options.folder) / tag);
}

nlohmann::json time_loads(Engine& engine, const Options& options) {
  std::vector<double> loads;
  for (int i = 0; i < options.rounds + 1; ++i) {
    loads.push_back(seconds_of(engine, [&] { engine.load_checkpoint(options.folder); }));
  }
  loads.erase(loads.begin());  // warms the page cache
  return {{"load", loads}};
}

nlohmann::json time_saves(Engine& engine, const Options& options) {
  std::vector<double> saves, loads;
  for (int i = 0; i < options.rounds + 1; ++i) {
    if (i > 0) remove_tag(engine, options, "sync" + std::to_string(i - 1));  // the last one is for --load_only
    const std::string tag = "sync" + std::to_string(i);
    saves.push_back(seconds_of(engine, [&] { engine.save_checkpoint(options.folder, tag); }));
    loads.push_back(seconds_of(engine, [&] { engine.load_checkpoint(options.folder, tag); }));
  }
  // The first of each warms the allocator.
  saves.erase(saves.begin());
  loads.erase(loads.begin());
  return {{"save", saves}, {"load", loads}};
}

template <class Step>
nlohmann::json time_beside(Engine& engine, const Options& options, const Step& step) {
  const char* const kinds[] = {"plain", "sync", "async"};
  std::map<std::string, std::vector<std::vector<double>>> blocks;
  std::vector<double> ends;  // what an asynchronous save took beyond its block
  for (int i = 0; i < options.rounds + 1; ++i) {
    for (int k = 0; k < 3; ++k) {
      const std::string kind = kinds[(i + k) % 3];
      const std::string tag = kind + std::to_string(i);
      std::vector<double> block = {seconds_of(engine, [&] {
        if (kind != "plain") engine.save_checkpoint(options.folder, tag, {.asynchronous = kind == "async"});
      })};
      for (int s = 0; s < options.beside; ++s) block.push_back(seconds_of(engine, step));
      const double end = seconds_of(engine, [&] { engine.wait_for_checkpoint(); });
      remove_tag(engine, options, tag);
      if (i == 0) continue;  // warms the allocator
      blocks[kind].push_back(block);
      if (kind == "async") ends.push_back(end);
    }
  }
  return {{"plain", blocks["plain"]}, {"sync", blocks["sync"]}, {"async", blocks["async"]}, {"end", ends}};
}

void run(const Options& options) {
  auto model = std::make_shared<Stack>(options);
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = options.config});
  const at::Tensor x = at::ones({options.rows, options.width});
  const auto step = [&] {
    engine->backward(model->forward(x));
    engine->step();
  };
  if (!options.load_only) step();
  nlohmann::json result;
  if (options.load_only) {
    result = time_loads(*engine, options);
  } else if (options.beside > 0) {
    result = time_beside(*engine, options, step);
  } else {
    result = time_saves(*engine, options);
  }
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
    auto* load_only = app.add_flag("--load_only", options.load_only);
    app.add_option("--beside", options.beside)->excludes(load_only);
    app.add_option("--local_rank")->group("");
    CLI11_PARSE(app, argc, argv);
    run(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "checkpoint_bench: " << error.what() << '\n';
    return 1;
  }
}
