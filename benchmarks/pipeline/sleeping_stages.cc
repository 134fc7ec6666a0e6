// A pipeline whose layers sleep in place of computing, so that a few cores run as many stages as a schedule needs.
//
//   ds-launch --num_procs 4 sleeping_stages --trace FILE [--schedule 1f1b] [--chunks 2] [--micro_batches 8]
//                                           [--layers 8] [--steps 3]
//                                           [--forward 12] [--backward_input 12] [--backward_weight 12]
//
// The times are milliseconds of one layer for one micro-batch; every rank has as many layers, whatever the number of
// its stages. Writes the trace of the last step for ds-tool schedule --measured (see bubble.py).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dsengine/engine.h"
#include "dsengine/pipeline.h"

namespace {

using ds::pipeline::LayerSpec;

struct LayerTimes {
  double forward = 12;  // milliseconds, as the others
  double backward_input = 12;
  double backward_weight = 12;
};

struct Options {
  LayerTimes times;
  std::string schedule = "1f1b";
  std::optional<int> chunks;
  int micro_batches = 8;
  int layers = 8;
  int steps = 3;
  std::string trace;
};

void sleep_ms(double milliseconds) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
}

// The identity; its backward sleeps.
struct SleepInBackward : torch::autograd::Function<SleepInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double milliseconds) {
    context->saved_data["milliseconds"] = milliseconds;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    sleep_ms(context->saved_data["milliseconds"].toDouble());
    return {gradients[0], at::Tensor()};
  }
};

// x * weight. One sleep is on the way to x alone, the other on the way to the weight alone, so that a backward in two
// parts (stage_backward.h) sleeps the one in its first part and the other in its second.
struct SleepingImpl : torch::nn::Module {
  explicit SleepingImpl(LayerTimes times_) : times(times_) {
    weight = register_parameter("weight", at::ones({kWidth}));
  }
  at::Tensor forward(const at::Tensor& x) {
    sleep_ms(times.forward);
    return SleepInBackward::apply(x, times.backward_input) * SleepInBackward::apply(weight, times.backward_weight);
  }
  static constexpr int64_t kWidth = 16;
  LayerTimes times;
  at::Tensor weight;
};
TORCH_MODULE(Sleeping);

// The batch requires no gradient; from here on there is one, as after a model's embedding, so that the first
// stage takes its time for backward too.
struct SourceImpl : torch::nn::Module {
  SourceImpl() { weight = register_parameter("weight", at::ones({SleepingImpl::kWidth})); }
  at::Tensor forward(const at::Tensor& x) { return x + weight; }
  at::Tensor weight;
};
TORCH_MODULE(Source);

std::shared_ptr<ds::pipeline::PipelineModule> make_model(const Options& options) {
  std::vector<LayerSpec> layers = {LayerSpec::of<Source>()};
  for (int i = 0; i < options.layers; ++i) layers.push_back(LayerSpec::of<Sleeping>(options.times));
  ds::pipeline::PipelineOptions pipeline{
      .loss = [](const at::Tensor& output, const at::Tensor& label) { return (output - label).square().mean(); },
      .schedule = options.schedule,
      .chunks = options.chunks,
      .partition = "type:Sleeping"};
  return std::make_shared<ds::pipeline::PipelineModule>(std::move(layers), std::move(pipeline));
}

void run(const Options& options) {
  const ds::engine::Distributed distributed = ds::engine::init_distributed();
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1},
                                 {"gradient_accumulation_steps", options.micro_batches},
                                 {"log_level", "warning"},
                                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}},
                                 {"pipeline", {{"stages", distributed.ranks->size()}}}};
  const auto parts =
      ds::engine::initialize({.model = make_model(options), .config = config, .distributed = distributed});
  ds::engine::Engine& engine = *parts.engine;
  engine.trace_pipeline(true);
  for (int step = 0; step < options.steps; ++step) {
    engine.train_batch([] {
      return ds::pipeline::MicroBatch{.inputs = {at::ones({1, SleepingImpl::kWidth})},
                                      .labels = {at::zeros({1, SleepingImpl::kWidth})}};
    });
  }
  engine.write_pipeline_trace(options.trace);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options;
    CLI::App app("Runs a pipeline of layers that sleep.", "sleeping_stages");
    app.add_option("--trace", options.trace, "file for the trace of the last step")->required();
    app.add_option("--schedule", options.schedule)->capture_default_str();
    app.add_option("--chunks", options.chunks, "stages a rank; default: of the schedule");
    app.add_option("--micro_batches", options.micro_batches)->capture_default_str();
    app.add_option("--layers", options.layers)->capture_default_str();
    app.add_option("--steps", options.steps)->capture_default_str();
    app.add_option("--forward", options.times.forward, "milliseconds of a layer")->capture_default_str();
    app.add_option("--backward_input", options.times.backward_input)->capture_default_str();
    app.add_option("--backward_weight", options.times.backward_weight)->capture_default_str();
    app.add_option("--local_rank")->group("");
    CLI11_PARSE(app, argc, argv);
    run(options);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "sleeping_stages: " << error.what() << '\n';
    return 1;
  }
}
