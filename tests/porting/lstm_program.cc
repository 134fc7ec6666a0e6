// A language model: an LSTM over packed sequences, an embedding that is also the output layer, two micro-batches a
// step.
#include <algorithm>
#include <tuple>

#include "tests/model/small_run.h"
#include "tests/porting/programs.h"

namespace ds::engine {
namespace {

namespace rnn = torch::nn::utils::rnn;

constexpr int64_t kWords = 24;
constexpr int64_t kHidden = 16;
constexpr int kAccumulation = 2;
constexpr int64_t kIgnored = -100;

struct Sentences {
  at::Tensor words;    // [sequences, longest]
  at::Tensor next;     // the same, kIgnored behind the end of a sequence
  at::Tensor lengths;  // [sequences]
};

// A micro-batch of one rank.
Sentences sentences_of(int64_t micro_batch) {
  constexpr int64_t kSequences = 3;
  at::Generator generator = generator_of(2000 + static_cast<uint64_t>(micro_batch));
  const at::Tensor lengths = torch::randint(2, 9, {kSequences}, generator, torch::kLong);
  const int64_t longest = lengths.max().item<int64_t>();
  const at::Tensor starts = torch::randint(kWords, {kSequences, 1}, generator, torch::kLong);
  const at::Tensor text = (starts + torch::arange(longest + 1) * 3) % kWords;
  const at::Tensor next = text.slice(1, 1).clone();
  for (int64_t i = 0; i < kSequences; ++i) next[i].slice(0, lengths[i].item<int64_t>()).fill_(kIgnored);
  return {text.slice(1, 0, longest), next, lengths};
}

struct LanguageModel : torch::nn::Module {
  LanguageModel()
      : embedding(register_module("embedding", torch::nn::Embedding(kWords, kHidden))),
        lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kHidden, kHidden).batch_first(true)))),
        bias(register_parameter("bias", torch::zeros({kWords}))) {
    draw_weights(*this, 2);
  }
  at::Tensor loss(const Sentences& sentences) {
    const auto packed = rnn::pack_padded_sequence(embedding(sentences.words), sentences.lengths, /*batch_first=*/true,
                                                  /*enforce_sorted=*/false);
    const auto output = std::get<0>(lstm->forward_with_packed_input(packed));
    const at::Tensor hidden = std::get<0>(rnn::pad_packed_sequence(output, /*batch_first=*/true));
    const at::Tensor logits = torch::matmul(hidden, embedding->weight.t()) + bias;
    return torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), sentences.next.flatten(),
        torch::nn::functional::CrossEntropyFuncOptions().ignore_index(kIgnored));
  }
  torch::nn::Embedding embedding;
  torch::nn::LSTM lstm;
  at::Tensor bias;
};

Losses train_lstm_plainly(int world) {
  LanguageModel model;
  torch::optim::AdamW optimizer(model.parameters(), adamw_options());
  Losses losses;
  const int micro_batches = kAccumulation * world;
  for (int step = 0; step < kProgramSteps; ++step) {
    optimizer.zero_grad();
    double total = 0;
    for (int i = 0; i < micro_batches; ++i) {
      const at::Tensor loss = model.loss(sentences_of(step * micro_batches + i)) / micro_batches;
      loss.backward();
      total += loss.item<double>();
    }
    optimizer.step();
    losses.push_back(total);
  }
  return losses;
}

Losses train_lstm_on_engine(comm::Communicator& communicator, const Config& zero) {
  const auto model = std::make_shared<LanguageModel>();
  const auto engine = start(model, adamw_config(zero, kAccumulation), communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    double total = 0;
    for (int i = 0; i < kAccumulation; ++i) {
      const int place = (step * kAccumulation + i) * communicator.size() + communicator.rank();
      const at::Tensor loss = model->loss(sentences_of(place));
      engine->backward(loss);
      engine->step();
      total += loss.item<double>() / kAccumulation;
    }
    losses.push_back(total);
  }
  return losses;
}

}  // namespace

Program packed_lstm() {
  return {.name = "PackedLstm",
          .train_plainly = train_lstm_plainly,
          .train_on_engine = train_lstm_on_engine,
          .config = [](int /*ranks*/, const Config& zero) { return adamw_config(zero, kAccumulation); },
          .cuts_global_batches = false};
}

}  // namespace ds::engine
