// Programs that carry something from step to step, or reach into a pass: a bank of keys, hidden states under no_sync(),
// parts that are frozen in turns, gradients that hooks scale, and a mixture density in float64.
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

// --- momentum contrast: keys of a slow encoder, which go into a bank of negatives -----------------------------------

nn::Sequential encoder() {
  nn::Sequential net(nn::Linear(10, 24), nn::ReLU(), nn::Linear(24, 6));
  draw_weights(*net, 301);
  return net;
}

// The rows of all ranks, in their order.
at::Tensor rows_of_ranks(const Trainer& trainer, const at::Tensor& rows) {
  if (trainer.ranks() == nullptr) return rows;
  const at::Tensor all = torch::empty({rows.size(0) * trainer.world(), rows.size(1)}, rows.options());
  trainer.ranks()->all_gather(all, rows.contiguous(), "keys of the bank").wait();
  return all;
}

Losses train_with_bank(const Trainer& trainer) {
  constexpr int64_t kBank = 3 * kGlobalBatch;
  nn::Sequential net = encoder();
  nn::Sequential slow = encoder();
  const auto model = trainer.train(net.ptr(), {.lr = 5e-3});
  at::Tensor bank = nn::functional::normalize(normal({kBank, 6}, 302));
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(30200 + 10 * step);
    const at::Tensor image = normal({kGlobalBatch, 10}, seed);
    const auto view = [&](uint64_t of) { return trainer.part(image + 0.3 * normal({kGlobalBatch, 10}, seed + of)); };
    at::Tensor keys;
    {
      const torch::NoGradGuard no_grad;
      keys = nn::functional::normalize(slow->forward(view(1)));
    }
    const at::Tensor queries = nn::functional::normalize(net->forward(view(2)));
    const at::Tensor alike = (queries * keys).sum(1, /*keepdim=*/true);
    const at::Tensor scores = torch::cat({alike, queries.matmul(bank.t())}, 1) / 0.2;
    const at::Tensor loss = torch::cross_entropy_loss(scores, torch::zeros({queries.size(0)}, torch::kLong));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
    const torch::NoGradGuard no_grad;
    bank = torch::cat({rows_of_ranks(trainer, keys), bank.slice(0, 0, kBank - kGlobalBatch)});
    const std::vector<at::Tensor> own = net->parameters(), followers = slow->parameters();
    for (size_t i = 0; i < own.size(); ++i) followers[i].mul_(0.9).add_(own[i], 0.1);
  }
  losses.push_back(sum_of_weights(*net) + sum_of_weights(*slow));
  return losses;
}

// --- a text in pieces: the state of an LSTM goes on from one micro-batch to the next, which no_sync() does not reduce

struct ReaderImpl : nn::Module {
  ReaderImpl() {
    letters = register_module("letters", nn::Embedding(12, 6));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 12).batch_first(true)));
    out = register_module("out", nn::Linear(12, 12));
    draw_weights(*this, 311);
  }
  at::Tensor loss(const at::Tensor& text) {  // [batch, time + 1]
    auto [outputs, last] = lstm->forward(letters(text.slice(1, 0, -1)), state);
    state = std::tuple(std::get<0>(last).detach(), std::get<1>(last).detach());
    return torch::cross_entropy_loss(out(outputs).flatten(0, 1), text.slice(1, 1).flatten());
  }
  nn::Embedding letters{nullptr};
  nn::LSTM lstm{nullptr};
  nn::Linear out{nullptr};
  std::optional<std::tuple<at::Tensor, at::Tensor>> state;
};
TORCH_MODULE(Reader);

Losses train_reader(const Trainer& trainer) {
  constexpr int kPieces = 3;
  constexpr int64_t kLength = 5;
  Reader net;
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2, .clip_norm = 0.5, .accumulation = kPieces});
  const at::Tensor start = integers(12, {kGlobalBatch, 1}, 312);
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    losses.push_back(0);
    for (int piece = 0; piece < kPieces; ++piece) {
      const at::Tensor at = torch::arange(kLength + 1) + (step * kPieces + piece) * kLength;
      const at::Tensor text = trainer.part((start + at * (1 + start % 3)) % 12);
      const at::Tensor loss = net->loss(text);
      if (const auto engine = model->engine(); engine && piece + 1 < kPieces) {
        const auto alone = engine->no_sync();
        model->backward(loss);
      } else {
        model->backward(loss);
      }
      model->step();
      losses.back() += loss.item<double>() / kPieces;
    }
    if (step % 4 == 3) net->state.reset();  // another text
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- two halves with an optimizer each, of which one is frozen while the other is trained ----------------------------

void freeze(nn::Module& module, bool frozen) {
  for (at::Tensor& parameter : module.parameters()) parameter.set_requires_grad(!frozen);
}

Losses train_in_turns(const Trainer& trainer) {
  nn::Sequential coder(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 3));
  nn::Sequential reader(nn::Linear(3, 16), nn::Tanh(), nn::Linear(16, 8));
  draw_weights(*coder, 321);
  draw_weights(*reader, 322);
  const auto first = trainer.train(coder.ptr(), {.lr = 1e-2});
  const auto second = trainer.train(reader.ptr(), {.lr = 5e-3, .clip_norm = 0.3});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const bool of_coder = step % 2 == 0;
    freeze(*coder, !of_coder);
    freeze(*reader, of_coder);
    const at::Tensor z = normal({kGlobalBatch, 3}, 32200 + static_cast<uint64_t>(step));
    const at::Tensor x = trainer.part(z.matmul(normal({3, 8}, 323)));
    const at::Tensor loss = torch::mse_loss(reader->forward(coder->forward(x)), x);
    const auto& trained = of_coder ? first : second;
    trained->backward(loss);
    trained->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*coder) + sum_of_weights(*reader));
  return losses;
}

// --- hooks on activations: every sample's gradient gets the same length, whatever its loss ---------------------------

at::Tensor of_one_length(const at::Tensor& activations) {
  activations.register_hook([](const at::Tensor& gradient) {
    const at::Tensor length = gradient.norm(2, {1}, /*keepdim=*/true).clamp_min(1e-12);
    return gradient / length / static_cast<double>(gradient.size(0));
  });
  return activations;
}

Losses train_by_directions(const Trainer& trainer) {
  nn::Linear in(6, 16), middle(16, 16), out(16, 2);
  nn::Sequential net(in, middle, out);
  draw_weights(*net, 331);
  const auto sgd = std::make_shared<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto model = trainer.train(net.ptr(), {.optimizer = sgd});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x = normal({kGlobalBatch, 6}, 33200 + static_cast<uint64_t>(step));
    const at::Tensor wanted = trainer.part(torch::stack({x.sum(1), x.select(1, 0) * x.select(1, 1)}, 1));
    const at::Tensor h = of_one_length(torch::tanh(in(trainer.part(x))));
    const at::Tensor loss = torch::mse_loss(out(of_one_length(torch::tanh(middle(h)))), wanted);
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- a mixture density: the logarithm of a sum of Gaussians, in float64 ----------------------------------------------

Losses train_mixture(const Trainer& trainer) {
  constexpr int64_t kParts = 4;
  nn::Sequential net(nn::Linear(1, 20), nn::Tanh(), nn::Linear(20, 3 * kParts));
  draw_weights(*net, 341);
  net->to(torch::kDouble);
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2, .clip_norm = 1.0});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(34200 + 10 * step);
    const at::Tensor y = (2 * uniform({kGlobalBatch, 1}, seed) - 1).to(torch::kDouble);
    const at::Tensor x = trainer.part(y + 0.6 * (6 * y).sin() + 0.05 * normal({kGlobalBatch, 1}, seed + 1));
    const std::vector<at::Tensor> of = net->forward(x).chunk(3, 1);
    const at::Tensor log_share = torch::log_softmax(of[0], 1);
    const at::Tensor log_width = of[2].clamp(-4, 2);
    const at::Tensor distance = (trainer.part(y) - of[1]) * (-log_width).exp();
    const at::Tensor log_density = log_share - log_width - 0.5 * distance.pow(2) - 0.5 * std::log(2 * M_PI);
    const at::Tensor loss = -torch::logsumexp(log_density, 1).mean();
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

}  // namespace

std::vector<Program> carried_programs() {
  return {written_once("KeyBank", train_with_bank), written_once("Reader", train_reader),
          written_once("Turns", train_in_turns), written_once("Directions", train_by_directions),
          written_once("Mixture", train_mixture, /*tolerance=*/1e-12)};
}

}  // namespace ds::engine
