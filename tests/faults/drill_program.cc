// A small training job for the fault drills, with one fault in it.
//
//   drill_program BACKEND STALL_LIMIT FAULT RANK [TENSOR [PIPE]]
//
// TENSOR ranks have parts of the layers (docs/tensor_parallel.md), where it is given, and PIPE ranks are a pipeline of
// them, whose faulty rank is of the last stage and does what it does in the forward of a micro-batch.
// Every step has a collective of the program's own ("metrics") beside those of the engine. At its third step, rank RANK
//   none     does what the others do
//   config   has another learning rate, from the start
//   sleep    sleeps for five times the stall limit
//   hang     sleeps for an hour
//   stop     stops itself (SIGSTOP)
//   kill     kills itself (SIGKILL)
//   leave    ends training in good order
//   skip     skips the program's collective
//   size     has other elements in it
//   dtype    has another data type in it
//   label    names it otherwise: the same bytes, of something else
//   receive  and the rank before it wait for a message of one another first
//   nan      has a NaN among its inputs
//   throw    throws
//   batch    has other inputs
//   rules    splits a layer otherwise, from the start
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/factory.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "dsengine/init_distributed.h"
#include "dsengine/pipeline.h"

namespace drill {

// What the stack of a late rank has to name.
void load_slowly(double seconds);
void load_slowly(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::puts("awake");
}

}  // namespace drill

namespace {

using drill::load_slowly;

constexpr int kSteps = 30;
constexpr int kFaultyStep = 3;

struct Drill {
  std::string backend;
  double stall_limit;
  std::string fault;
  int rank;
  int tensor = 1;
  int pipe = 1;
};

std::string config_of(const Drill& drill, int rank) {
  const bool other = drill.fault == "config" && rank == drill.rank;
  return ds::cat(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": )",
                 other ? "2e-3" : "1e-3", R"(}},
    "zero_optimization": {"stage": 2}, "communication_backend": ")",
                 drill.backend, R"(", "tensor_parallel": {"autotp_size": )", drill.tensor,
                 R"(}, "pipeline": {"stages": )", drill.pipe, R"(}, "gradient_accumulation_steps": )", drill.pipe,
                 R"(, "flight_recorder": {"stall_limit": )", drill.stall_limit, "}}");
}

std::vector<ds::parallel::SplitRule> rules_of(const Drill& drill, int rank) {
  using enum ds::parallel::Style;
  if (drill.tensor == 1) return {};
  if (drill.pipe > 1) return {{"a|c", kColumn}, {"b|d", kRow}};
  return {{"0", kColumn}, {"1", drill.fault == "rules" && rank == drill.rank ? kWhole : kRow}};
}

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

void wait_for_each_other(ds::comm::Communicator& ranks, int partner) {
  const at::Tensor box = torch::zeros({3});
  ranks.recv(box, partner);
}

bool be_faulty(const Drill& drill, ds::comm::Communicator& ranks, at::Tensor& input) {
  const std::string& fault = drill.fault;
  if (fault == "sleep") load_slowly(5 * drill.stall_limit);
  if (fault == "hang") load_slowly(3600);
  if (fault == "stop") raise(SIGSTOP);
  if (fault == "kill") raise(SIGKILL);
  if (fault == "leave") return false;
  if (fault == "receive") wait_for_each_other(ranks, drill.rank - 1);
  if (fault == "nan") input[1][2] = NAN;
  if (fault == "batch") input.mul_(2);
  if (fault == "throw") throw std::runtime_error("the drill throws");
  return true;
}

void reduce_metrics(const Drill& drill, ds::comm::Communicator& ranks, bool faulty) {
  if (faulty && drill.fault == "skip") return;
  const bool longer = faulty && drill.fault == "size";
  const bool wider = faulty && drill.fault == "dtype";
  const at::Tensor metrics = torch::zeros({longer ? 6 : 5}, wider ? at::kInt : at::kFloat);
  ranks.all_reduce(metrics, ds::comm::ReduceOp::kSum, faulty && drill.fault == "label" ? "other metrics" : "metrics")
      .wait();
}

// Two stages of a column and a row layer each. The fault is between those of the last stage, in the second micro-batch
// of its step.
int train_pipeline(const Drill& drill, const ds::engine::Distributed& job) {
  using ds::pipeline::LayerSpec;
  using torch::nn::Linear;
  int forwards = 0;
  const auto pass = [&](at::Tensor x) {
    if (++forwards == kFaultyStep * drill.pipe && job.ranks->rank() == drill.rank) be_faulty(drill, *job.ranks, x);
    return x;
  };
  const std::vector<LayerSpec> layers = {
      LayerSpec::of<Linear>(8, 16).named("a"), LayerSpec::of<Linear>(16, 8).named("b"),
      LayerSpec::of<Linear>(8, 16).named("c"), LayerSpec::function(pass), LayerSpec::of<Linear>(16, 1).named("d")};
  const auto loss = [](const at::Tensor& output, const at::Tensor& label) { return (output - label).square().mean(); };
  const auto model = std::make_shared<ds::pipeline::PipelineModule>(
      layers, ds::pipeline::PipelineOptions{.loss = loss, .seed_layers = true});
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model,
                              .config = nlohmann::json::parse(config_of(drill, job.ranks->rank())),
                              .split = rules_of(drill, job.ranks->rank()),
                              .distributed = job});
  for (int step = 1; step <= kSteps; ++step) {
    engine->train_batch([] {
      const at::Tensor input = torch::ones({4, 8});
      return ds::pipeline::MicroBatch{.inputs = {input}, .labels = {input.sum(1, true)}};
    });
    sleep_for(0.05);
  }
  std::puts("trained");
  return 0;
}

int train(const Drill& drill) {
  torch::manual_seed(1);
  const auto job = ds::engine::init_distributed(
      {.backend = ds::comm::parse_backend(drill.backend),
       .timeout = std::chrono::seconds(60),
       .flight = {.stall_limit = std::chrono::milliseconds(static_cast<int>(drill.stall_limit * 1e3))}});
  if (drill.pipe > 1) return train_pipeline(drill, job);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::Linear(16, 1));
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(),
                              .config = nlohmann::json::parse(config_of(drill, job.ranks->rank())),
                              .split = rules_of(drill, job.ranks->rank()),
                              .distributed = job});
  for (int step = 1; step <= kSteps; ++step) {
    const bool faulty = step == kFaultyStep && job.ranks->rank() == drill.rank;
    at::Tensor input = torch::randn({4, 8});
    if (step == kFaultyStep && drill.fault == "receive" && job.ranks->rank() == drill.rank - 1) {
      wait_for_each_other(*job.ranks, drill.rank);
    }
    if (faulty && !be_faulty(drill, *job.ranks, input)) return 0;
    if (drill.tensor == 1) reduce_metrics(drill, *job.ranks, faulty);  // else layers are the first to meet
    engine->backward((model->forward(input) - input.sum(1, true)).square().mean());
    engine->step();
    sleep_for(0.05);
  }
  std::puts("trained");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5 || argc > 7) {
    std::fputs("usage: drill_program BACKEND STALL_LIMIT FAULT RANK [TENSOR [PIPE]]\n", stderr);
    return 2;
  }
  try {
    return train({argv[1], std::stod(argv[2]), argv[3], std::stoi(argv[4]), argc > 5 ? std::stoi(argv[5]) : 1,
                  argc > 6 ? std::stoi(argv[6]) : 1});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
