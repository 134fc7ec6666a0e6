// The cost of interpreting an exported model: a training step of the GPT in tests/exported/data, interpreted and
// written in C++, on the same weights, on one thread; and the time to read a file.
//
//   exported_bench [--model gpt.pt2] [--batch 64] [--length 16] [--steps 20] [--pairs 5]
//   exported_bench --load model.pt2
//
// A step is forward, loss and backward, with dropout; its time is the CPU time of the thread, so that other programs
// count little. A run is the median of --steps steps of one kind, a pair is a run of each kind, the steps in turn;
// printed are the ratio of each pair and their median, and for both kinds the largest sum of bytes of tensors that live
// at once within a step. Checked: the same loss in both, to the bit, as both draw dropout from one seed. --model: any
// export of the class Gpt in tests/exported/models.py with two heads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "core/check.h"
#include "core/text.h"
#include "dsengine/exported_model.h"
#include "profiling/tensor_memory.h"

namespace {

constexpr int64_t kHeads = 2;
constexpr double kDropout = 0.1;

// The class Gpt of tests/exported/models.py, in C++, with the parameters of the exported one.
class WrittenGpt {
 public:
  explicit WrittenGpt(const torch::nn::Module& exported) {
    const auto parameters = exported.named_parameters();
    const auto take = [&](const std::string& name) { return parameters[name]; };
    const auto layer = [&](const std::string& name) { return Layer{take(name + ".weight"), take(name + ".bias")}; };
    words_ = take("wte.weight");
    places_ = take("wpe.weight");
    last_ = layer("ln_f");
    for (int64_t i = 0; parameters.contains(ds::cat("h.", i, ".ln1.weight")); ++i) {
      const std::string block = ds::cat("h.", i, ".");
      blocks_.push_back({layer(block + "ln1"), layer(block + "ln2"), layer(block + "attn.qkv"),
                         layer(block + "attn.proj"), layer(block + "fc"), layer(block + "proj")});
    }
  }

  at::Tensor forward(const at::Tensor& tokens) const {
    at::Tensor x = at::embedding(words_, tokens) + at::embedding(places_, at::arange(tokens.size(1), at::kLong));
    for (const Block& block : blocks_) {
      x = x + attention(block, normalized(block.first, x));
      const at::Tensor wide = at::gelu(linear(block.wide, normalized(block.second, x)), "tanh");
      x = x + at::dropout(linear(block.narrow, wide), kDropout, /*train=*/true);
    }
    return at::linear(normalized(last_, x), words_);
  }

 private:
  struct Layer {
    at::Tensor weight, bias;
  };
  struct Block {
    Layer first, second, qkv, joined, wide, narrow;
  };

  static at::Tensor linear(const Layer& layer, const at::Tensor& x) { return at::linear(x, layer.weight, layer.bias); }
  static at::Tensor normalized(const Layer& layer, const at::Tensor& x) {
    return at::layer_norm(x, {x.size(-1)}, layer.weight, layer.bias);
  }
  static at::Tensor attention(const Block& block, const at::Tensor& x) {
    const int64_t batch = x.size(0);
    const int64_t length = x.size(1);
    const int64_t width = x.size(2);
    const auto parts = linear(block.qkv, x).split(width, 2);
    const auto heads = [&](const at::Tensor& of) {
      return of.view({batch, length, kHeads, width / kHeads}).transpose(1, 2);
    };
    const at::Tensor y = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), {},
                                                          kDropout, /*is_causal=*/true);
    return linear(block.joined, y.transpose(1, 2).reshape({batch, length, width}));
  }

  at::Tensor words_, places_;
  Layer last_;
  std::vector<Block> blocks_;
};

struct Options {
  std::string model = std::string(DS_SOURCE_DIR) + "/tests/exported/data/gpt.pt2";
  int64_t batch = 64;
  int64_t length = 16;
  int64_t steps = 20;
  int64_t pairs = 5;
};

class Job {
 public:
  explicit Job(const Options& options)
      : exported_(ds::load_exported(options.model)), written_(*exported_), steps_(options.steps) {
    const int64_t vocabulary = exported_->named_parameters()["wte.weight"].size(0);
    tokens_ = (at::arange(options.batch * options.length, at::kLong) * 31 % vocabulary);
    tokens_ = tokens_.view({options.batch, options.length});
    next_ = tokens_.roll(-1, 1).reshape({-1});
    for (const bool interpreted : {false, true}) run(interpreted);
  }

  // Returns the CPU time of one step.
  double run(bool interpreted) {
    torch::manual_seed(7);
    const double start = ds::benchmarks::thread_seconds();
    {
      const at::Tensor output = interpreted ? exported_->forward(tokens_) : written_.forward(tokens_);
      const at::Tensor loss = at::cross_entropy_loss(output.reshape({-1, output.size(-1)}), next_);
      loss.backward();
      if (!loss_.defined()) loss_ = loss.detach();
      ds::require<ds::InternalError>(loss.equal(loss_), "expected the loss ", loss_.item<float>(),
                                     " of the first step in every step, found ", loss.item<float>());
    }
    const double seconds = ds::benchmarks::thread_seconds() - start;
    for (const at::Tensor& parameter : exported_->parameters()) parameter.mutable_grad().zero_();
    return seconds;
  }

  // Returns the medians of --steps steps of both kinds in turn: written, interpreted.
  std::pair<double, double> pair() {
    std::vector<double> written;
    std::vector<double> interpreted;
    for (int64_t step = 0; step < steps_; ++step) {
      const bool first = step % 2 == 0;
      (first ? interpreted : written).push_back(run(first));
      (first ? written : interpreted).push_back(run(!first));
    }
    return {ds::benchmarks::quantile(written, 0.5), ds::benchmarks::quantile(interpreted, 0.5)};
  }

  // Returns the most bytes of tensors that one step has at once, beside what lives before it.
  int64_t peak_bytes(bool interpreted) {
    ds::profiling::TensorMemory memory;
    run(interpreted);
    return memory.take_peak_bytes();
  }

 private:
  std::shared_ptr<ds::ExportedModule> exported_;
  WrittenGpt written_;
  int64_t steps_;
  at::Tensor tokens_, next_, loss_;
};

void compare(const Options& options) {
  Job job(options);
  std::printf("%s, batch %ld x %ld, %ld steps a run\n%12s %16s %8s\n", options.model.c_str(), options.batch,
              options.length, options.steps, "written, us", "interpreted, us", "ratio");
  std::vector<double> ratios;
  for (int64_t i = 0; i < options.pairs; ++i) {
    const auto [written, interpreted] = job.pair();
    ratios.push_back(interpreted / written);
    std::printf("%12.1f %16.1f %8.4f\n", written * 1e6, interpreted * 1e6, ratios.back());
  }
  std::printf("median ratio %.4f; peak bytes of tensors: written %ld, interpreted %ld\n",
              ds::benchmarks::quantile(ratios, 0.5), job.peak_bytes(false), job.peak_bytes(true));
}

void time_loading(const std::string& path) {
  for (int i = 0; i < 3; ++i) {
    std::shared_ptr<ds::ExportedModule> model;
    const double start = ds::benchmarks::thread_seconds();
    model = ds::load_exported(path);
    const double seconds = ds::benchmarks::thread_seconds() - start;
    std::printf("%s: read in %.3f s of CPU time, %zu parameters\n", path.c_str(), seconds, model->parameters().size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What interpreting an exported model costs a training step, and what reading it takes");
  Options options;
  std::string load;
  app.add_option("--model", options.model, "an export of Gpt in tests/exported/models.py");
  app.add_option("--batch", options.batch, "sequences a step")->check(CLI::PositiveNumber);
  app.add_option("--length", options.length, "tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "steps of each kind in a run")->check(CLI::PositiveNumber);
  app.add_option("--pairs", options.pairs, "paired runs")->check(CLI::PositiveNumber);
  app.add_option("--load", load, "time the reading of this file, and nothing else");
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(1);
    load.empty() ? compare(options) : time_loading(load);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "exported_bench: " << error.what() << '\n';
    return 1;
  }
}
