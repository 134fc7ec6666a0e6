// Models with sparse tables, and what plain torch trains them with.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "tests/model/small_run.h"

namespace ds::engine {

struct RowNetOptions {
  bool sparse = true;
  int64_t rows = 211;
  bool tied = false;               // the words have a second name
  std::optional<double> max_norm;  // of the words
  bool meets = false;              // a micro-batch without words reads none of them, in place of no read
};

// A table of words of 6 elements, a bag of 5, and a dense layer.
struct RowNetImpl : torch::nn::Module {
  explicit RowNetImpl(const RowNetOptions& options = {}) : rows(options.rows), meets(options.meets) {
    words = register_module(
        "words",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, 6).sparse(options.sparse).max_norm(options.max_norm)));
    tags = register_module("tags", torch::nn::EmbeddingBag(
                                       torch::nn::EmbeddingBagOptions(97, 5).mode(torch::kSum).sparse(options.sparse)));
    last = register_module("last", torch::nn::Linear(11, 3));
    fill(*this);
    if (options.tied) register_parameter("words_again", words->weight);
  }
  // Some rows are read twice. `reads` false: the words stay out.
  at::Tensor loss(int64_t micro_batch, int rank, bool reads = true) {
    const at::Tensor numbers = (torch::arange(8) * 31 + 17 * micro_batch + 5 * rank).remainder(61);
    const auto options = words->weight.options().requires_grad(false);
    at::Tensor word = reads ? words((numbers * 3).remainder(rows)) : torch::ones({8, 6}, options);
    if (!reads && meets) word = word + words(torch::empty({0}, torch::kLong)).sum();
    const at::Tensor tag = tags(torch::stack({numbers, numbers * 7}, 1).remainder(97));
    const at::Tensor out = last(torch::tanh(torch::cat({word, tag}, 1)));
    return (out - torch::sin(numbers.to(out.scalar_type())).unsqueeze(1) * 2.0).pow(2).mean();
  }
  int64_t rows;
  bool meets;
  torch::nn::Embedding words{nullptr};
  torch::nn::EmbeddingBag tags{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(RowNet);

constexpr int kRowMicroBatches = 2;
constexpr double kRowClip = 0.4;

inline nlohmann::ordered_json row_config(int stage, const std::string& type) {
  nlohmann::ordered_json config = small_config(stage, kRowMicroBatches);
  config["gradient_clipping"] = kRowClip;
  config["zero_allow_untested_optimizer"] = true;
  config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.05}}}};
  return config;
}

// torch.optim.SparseAdam for sparse gradients, torch.optim.Adam for others: LibTorch lacks the first.
class LazyAdam {
 public:
  void step(torch::nn::Module& module) {
    const torch::NoGradGuard no_grad;
    ++step_;
    const double step_size = 0.05 / (1 - std::pow(0.9, step_));
    const double root = std::sqrt(1 - std::pow(0.999, step_));
    for (auto& item : module.named_parameters()) {
      at::Tensor& parameter = item.value();
      const at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      auto& [mean, square] = states_[item.key()];
      if (!mean.defined()) mean = torch::zeros_like(parameter), square = torch::zeros_like(parameter);
      if (!gradient.is_sparse()) {
        mean.mul_(0.9).add_(gradient, 0.1);
        square.mul_(0.999).addcmul_(gradient, gradient, 0.001);
        parameter.sub_(step_size * mean / (square.sqrt() / root + 1e-8));
        continue;
      }
      const at::Tensor rows = gradient._indices()[0];
      const at::Tensor values = gradient._values();
      const at::Tensor own_mean = mean.index_select(0, rows) * 0.9 + values * 0.1;
      const at::Tensor own_square = square.index_select(0, rows) * 0.999 + values * values * 0.001;
      mean.index_copy_(0, rows, own_mean);
      square.index_copy_(0, rows, own_square);
      parameter.index_add_(0, rows, step_size * root * own_mean / (own_square.sqrt() + 1e-8), -1);
    }
  }

 private:
  double step_ = 0;
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> states_;
};

}  // namespace ds::engine
