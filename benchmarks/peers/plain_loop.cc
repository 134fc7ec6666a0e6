// One rank of the benchmark job as a loop of the program's own, loss.backward() and a step of ds::FusedAdamW, or as
// the engine's with that optimizer. Started by compare.py under ds-launch.
//
//   plain_loop KIND LAYERS HIDDEN HEADS SEQ_LEN STEPS WARM LR TEXT OUT
//   KIND: loop-ddp, loop-fsdp, engine0, engine3; writes OUT.<rank> as JSON, as peer.py does
#include <dsengine/distributed_data_parallel.h>
#include <dsengine/engine.h>
#include <dsengine/fully_shard.h>
#include <dsengine/fused_optimizers.h>
#include <dsengine/init_distributed.h>
#include <dsengine/initialize.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "examples/gpt/token_batches.h"

namespace {

constexpr int64_t kMicroBatch = 4;
constexpr uint64_t kSeed = 1234;  // of the peers' weights

// One step on a batch, and its loss.
using Step = std::function<double(const gpt::TokenBatch&)>;

torch::optim::AdamWOptions adamw(double lr) { return torch::optim::AdamWOptions(lr).weight_decay(0.01); }

// The loop that both wrappers have; `clip` returns nothing that is needed.
Step plain_step(const std::shared_ptr<gpt::Gpt>& model, const std::vector<at::Tensor>& trained, double lr,
                const std::function<void()>& clip) {
  const auto optimizer = std::make_shared<ds::FusedAdamW>(trained, adamw(lr));
  return [=](const gpt::TokenBatch& batch) {
    const at::Tensor loss = model->forward(batch.data, batch.target);
    loss.backward();
    clip();
    optimizer->step();
    optimizer->zero_grad();
    return loss.item<double>();
  };
}

Step ddp_step(const std::shared_ptr<gpt::Gpt>& model, double lr) {
  const auto ddp = std::make_shared<ds::DistributedDataParallel<std::shared_ptr<gpt::Gpt>>>(model);
  return plain_step(model, model->parameters(), lr,
                    [ddp] { torch::nn::utils::clip_grad_norm_(ddp->module->parameters(), 1.0); });
}

Step fsdp_step(const std::shared_ptr<gpt::Gpt>& model, double lr) {
  for (const auto& child : model->modules(/*include_self=*/false)) {
    if (child->as<gpt::Block>() != nullptr) ds::fully_shard(child);
  }
  const auto sharded = ds::fully_shard(std::static_pointer_cast<torch::nn::Module>(model));
  return plain_step(model, sharded->parameters(), lr, [sharded] { sharded->clip_grad_norm_(1.0); });
}

Step engine_step(const std::shared_ptr<gpt::Gpt>& model, double lr, int stage) {
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", kMicroBatch},
                                 {"gradient_clipping", 1.0},
                                 {"zero_optimization", {{"stage", stage}}}};
  auto run = ds::engine::initialize({.model = model,
                                     .config = config,
                                     .optimizer = std::make_shared<ds::FusedAdamW>(model->parameters(), adamw(lr))});
  return [model, engine = run.engine](const gpt::TokenBatch& batch) {
    const at::Tensor loss = model->forward(batch.data, batch.target);
    engine->backward(loss);
    engine->step();
    return loss.item<double>();
  };
}

Step make_step(const std::string& kind, const std::shared_ptr<gpt::Gpt>& model, double lr) {
  if (kind == "loop-ddp") return ddp_step(model, lr);
  if (kind == "loop-fsdp") return fsdp_step(model, lr);
  if (kind == "engine0" || kind == "engine3") return engine_step(model, lr, kind.back() - '0');
  throw std::runtime_error("expected loop-ddp, loop-fsdp, engine0 or engine3, found " + kind);
}

int64_t peak_rss_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  throw std::runtime_error("/proc/self/status has no VmHWM");
}

double seconds_of(std::chrono::duration<double> duration) { return duration.count(); }

void run(const std::vector<std::string>& arguments) {
  const auto number = [&](size_t i) { return std::stoll(arguments.at(i)); };
  const gpt::GptConfig config = {
      .layers = number(1), .hidden = number(2), .heads = number(3), .seq_len = number(4), .whole_logits = false};
  const int64_t steps = number(5);
  const int64_t warm = number(6);
  const ds::engine::Distributed job = ds::engine::init_distributed({.device = "cpu"});
  const auto model = std::make_shared<gpt::Gpt>(config);
  gpt::initialize_weights(*model, kSeed);
  const Step step = make_step(arguments.at(0), model, std::stod(arguments.at(7)));
  gpt::TextCorpus corpus = gpt::TextCorpus::open(arguments.at(8));
  const int ranks = job.ranks->size();
  gpt::TokenBatches batches(corpus, {.order = gpt::Order::kSequential,
                                     .batch_size = kMicroBatch,
                                     .seq_len = config.seq_len,
                                     .vocab = config.vocab,
                                     .rank = job.ranks->rank(),
                                     .world_size = ranks});
  nlohmann::json result = {{"step_seconds", nlohmann::json::array()}, {"loss", nlohmann::json::array()}};
  for (int64_t s = 0; s < warm + steps; ++s) {
    const auto begin = std::chrono::steady_clock::now();
    result["loss"].push_back(step(batches.get(s * kMicroBatch * ranks)));
    if (s >= warm) result["step_seconds"].push_back(seconds_of(std::chrono::steady_clock::now() - begin));
    if (s == 0) result["first_step_at"] = seconds_of(std::chrono::system_clock::now().time_since_epoch());
  }
  result["peak_rss_bytes"] = peak_rss_bytes();
  std::ofstream(arguments.at(9) + "." + std::to_string(job.ranks->rank())) << result;
  job.ranks->barrier();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "plain_loop: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
