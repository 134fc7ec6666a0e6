// Programs about sequences: distillation, adapters on frozen weights, translation with padding, experts by hand, speech
// recognition, and training on preferences.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/checkpoint.h"
#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

constexpr int64_t kVocabulary = 20;

// --- distillation: a teacher that is evaluated only, two backward passes, and the config's StepLR -------------------

struct TaggerImpl : nn::Module {
  TaggerImpl(int64_t width, uint64_t seed) {
    words = register_module("words", nn::Embedding(kVocabulary, width));
    const auto layer = nn::TransformerEncoderLayerOptions(width, 2).dim_feedforward(2 * width).dropout(0.0);
    encoder = register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderLayer(layer), 1));
    head = register_module("head", nn::Linear(width, kVocabulary));
    draw_weights(*this, seed);
  }
  at::Tensor encode(const at::Tensor& x) { return encoder(words(x).transpose(0, 1)); }
  nn::Embedding words{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Tagger);

struct StudentImpl : nn::Module {
  StudentImpl() {
    tagger = register_module("tagger", Tagger(8, 101));
    projection = register_module("projection", nn::Linear(8, 16));
    draw_weights(*projection, 102);
  }
  Tagger tagger{nullptr};
  nn::Linear projection{nullptr};
};
TORCH_MODULE(Student);

Losses distill(const Trainer& trainer) {
  Tagger teacher(16, 103);
  Student student;
  const auto teacher_model = trainer.evaluate(teacher.ptr());
  const Config schedule = {{"type", "StepLR"}, {"params", {{"step_size", 4}, {"gamma", 0.5}}}};
  const auto model = trainer.train(
      student.ptr(),
      {.lr = 3e-3, .lr_factor = [](int64_t k) { return std::pow(0.5, k / 4); }, .keys = {{"scheduler", schedule}}});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x = trainer.part(integers(kVocabulary, {kGlobalBatch, 6}, 10400 + static_cast<uint64_t>(step)));
    const at::Tensor labels = x.roll(1, 1).transpose(0, 1).flatten();
    at::Tensor taught, taught_hidden;
    {
      const torch::NoGradGuard no_grad;
      taught_hidden = teacher->encode(x);
      taught = torch::softmax(teacher->head(taught_hidden) / 2, -1);
    }
    const at::Tensor hidden = student->tagger->encode(x);
    const at::Tensor scores = student->tagger->head(hidden);
    const at::Tensor imitation =
        torch::kl_div(torch::log_softmax(scores / 2, -1), taught, at::Reduction::Sum) / labels.numel() +
        0.1 * torch::mse_loss(student->projection(hidden), taught_hidden);
    const at::Tensor own = torch::cross_entropy_loss(scores.flatten(0, 1), labels);
    model->backward(imitation, /*retain_graph=*/true);
    model->backward(0.5 * own);
    model->step();
    losses.insert(losses.end(), {imitation.item<double>(), own.item<double>()});
  }
  losses.push_back(sum_of_weights(*student) + sum_of_weights(*teacher));
  return losses;
}

// --- LoRA: the base is frozen, and the file has the adapters alone --------------------------------------------------

struct AdaptedLinearImpl : nn::Module {
  AdaptedLinearImpl(int64_t inputs, int64_t outputs) {  // [in, out], as Hugging Face's GPT-2 has it
    weight = register_parameter("weight", torch::zeros({inputs, outputs}), /*requires_grad=*/false);
    lora_a = register_parameter("lora_A", torch::zeros({inputs, 2}));
    lora_b = register_parameter("lora_B", torch::zeros({2, outputs}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::matmul(x, weight) + 2 * torch::matmul(torch::matmul(x, lora_a), lora_b);
  }
  at::Tensor weight, lora_a, lora_b;
};
TORCH_MODULE(AdaptedLinear);

struct AdaptedNetImpl : nn::Module {
  AdaptedNetImpl() {
    words = register_module("words", nn::Embedding(kVocabulary, 12));
    words->weight.set_requires_grad(false);
    for (int i = 0; i < 2; ++i) {
      up.push_back(register_module("up" + std::to_string(i), AdaptedLinear(12, 24)));
      down.push_back(register_module("down" + std::to_string(i), AdaptedLinear(24, 12)));
    }
    draw_weights(*this, 111);
    const torch::NoGradGuard no_grad;
    for (const auto& item : named_parameters()) {
      if (item.key().ends_with("lora_B")) item.value().zero_();
    }
  }
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor h = words(x.slice(1, 0, -1));
    for (size_t i = 0; i < up.size(); ++i) h = h + down[i](torch::gelu(up[i](h)));
    return torch::cross_entropy_loss(torch::matmul(h, words->weight.t()).flatten(0, 1), x.slice(1, 1).flatten());
  }
  nn::Embedding words{nullptr};
  std::vector<AdaptedLinear> up, down;
};
TORCH_MODULE(AdaptedNet);

Losses train_adapters(const Trainer& trainer) {
  AdaptedNet net;
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2, .clip_norm = 1.0});
  const auto counting = [&](int step) {
    const at::Tensor first = integers(kVocabulary, {kGlobalBatch, 1}, 11200 + static_cast<uint64_t>(step));
    return trainer.part((first + 3 * torch::arange(7)).remainder(kVocabulary));
  };
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor loss = net->loss(counting(step));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  const auto adapters = checkpoint::open_weights(model->save("adapters.safetensors", /*exclude_frozen=*/true));
  losses.push_back(static_cast<double>(adapters->tensors().size()));
  AdaptedNet fresh;  // with the base that all begin with
  checkpoint::load_module(*adapters, *fresh, /*strict=*/false);
  losses.push_back(fresh->loss(counting(100)).item<double>());
  return losses;
}

// --- translation: padding, other lengths on each rank and in each micro-batch, the loss per token -------------------

struct TranslatorImpl : nn::Module {
  TranslatorImpl() {
    words = register_module("words", nn::Embedding(kVocabulary, 8));
    const auto options = nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(16).dropout(0.0);
    body = register_module("body", nn::Transformer(options));
    head = register_module("head", nn::Linear(8, kVocabulary));
    draw_weights(*this, 121);
    places = register_buffer("places", 0.5 * normal({32, 1, 8}, 122));
  }
  at::Tensor sum_of_losses(const at::Tensor& source, const at::Tensor& target) {  // [batch, length]; 0 is padding
    const at::Tensor given = target.slice(1, 0, -1);
    const int64_t length = given.size(1);
    const at::Tensor later = torch::full({length, length}, -1e9).triu(1);
    const auto embedded = [&](const at::Tensor& x) { return words(x).transpose(0, 1) + places.slice(0, 0, x.size(1)); };
    const at::Tensor out =
        body->forward(embedded(source), embedded(given), {}, later, {}, source.eq(0), given.eq(0), source.eq(0));
    return torch::cross_entropy_loss(head(out).transpose(0, 1).flatten(0, 1), target.slice(1, 1).flatten(), {},
                                     at::Reduction::Sum, /*ignore_index=*/0);
  }
  nn::Embedding words{nullptr};
  nn::Transformer body{nullptr};
  nn::Linear head{nullptr};
  at::Tensor places;
};
TORCH_MODULE(Translator);

struct Pairs {
  at::Tensor source, target;
};

// `count` sentences from number `first` on, padded to the longest of them. The later ones of a batch are shorter.
Pairs sentences(int64_t first, int64_t count) {
  std::vector<at::Tensor> source, target;
  int64_t longest = 0;
  for (int64_t number = first; number < first + count; ++number) {
    const int64_t length = 2 + (number * 5) % 7 + (number % kGlobalBatch < kGlobalBatch / 2 ? 3 : 0);
    source.push_back(2 + integers(kVocabulary - 2, {length}, 12300 + static_cast<uint64_t>(number)));
    target.push_back(torch::cat({torch::ones({1}, torch::kLong), source.back().flip(0)}));
    longest = std::max(longest, length);
  }
  for (at::Tensor& one : source) one = torch::constant_pad_nd(one, {0, longest - one.size(0)});
  for (at::Tensor& one : target) one = torch::constant_pad_nd(one, {0, longest + 1 - one.size(0)});
  return {torch::stack(source), torch::stack(target)};
}

Losses train_translator(const Trainer& trainer) {
  constexpr int kMicroBatches = 2;
  Translator net;
  const auto model = trainer.train(net.ptr(), {.lr = 3e-3, .clip_norm = 1.0, .accumulation = kMicroBatches});
  const int64_t own = kGlobalBatch / trainer.world() / kMicroBatches;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    std::vector<Pairs> micro;
    at::Tensor tokens = torch::zeros({}, torch::kLong);  // of the rank's step
    for (int i = 0; i < kMicroBatches; ++i) {
      const int64_t first = step * kGlobalBatch + (trainer.rank() * kMicroBatches + i) * own;
      micro.push_back(sentences(first, own));
      tokens += micro.back().target.slice(1, 1).ne(0).sum();
    }
    double of_step = 0;
    for (const Pairs& pairs : micro) {
      const at::Tensor loss = trainer.per_item(net->sum_of_losses(pairs.source, pairs.target), tokens);
      model->backward(loss, /*retain_graph=*/false, /*scale_wrt_gas=*/false);
      model->step();
      of_step += loss.item<double>();
    }
    losses.push_back(of_step);
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- experts by hand: each rank runs those that its tokens have chosen ----------------------------------------------

constexpr int64_t kExperts = 4;

struct ExpertsImpl : nn::Module {
  ExpertsImpl() {
    in = register_module("in", nn::Linear(4, 12));
    gate = register_module("gate", nn::Linear(12, kExperts));
    experts = register_module("experts", nn::ModuleList());
    for (int64_t i = 0; i < kExperts; ++i) {
      experts->push_back(nn::Sequential(nn::Linear(12, 24), nn::GELU(), nn::Linear(24, 12)));
    }
    out = register_module("out", nn::Linear(12, 1));
    draw_weights(*this, 131);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& preference) {
    const at::Tensor h = torch::tanh(in(x));
    const auto [weight, chosen] = torch::softmax(gate(h) + preference, -1).max(-1);
    at::Tensor sum = h;
    for (int64_t i = 0; i < kExperts; ++i) {
      const at::Tensor own = chosen.eq(i).nonzero().squeeze(1);
      if (own.numel() == 0) continue;
      const at::Tensor y = experts->ptr<nn::SequentialImpl>(static_cast<size_t>(i))->forward(h.index_select(0, own));
      sum = sum.index_add(0, own, y * weight.index_select(0, own).unsqueeze(1));
    }
    return out(sum);
  }
  nn::Linear in{nullptr}, gate{nullptr}, out{nullptr};
  nn::ModuleList experts{nullptr};
};
TORCH_MODULE(Experts);

Losses train_experts(const Trainer& trainer) {
  Experts net;
  const auto model = trainer.train(net.ptr(), {.lr = 3e-3});
  at::Tensor preference = torch::zeros({2 * kGlobalBatch, kExperts});
  preference.slice(0, 0, kGlobalBatch / 2).select(1, 0).fill_(20.0);  // the first quarter uses expert 0 alone
  preference.slice(0, kGlobalBatch).select(1, 3).fill_(-20.0);        // the second half never uses expert 3
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor x = trainer.part(normal({2 * kGlobalBatch, 4}, 13200 + static_cast<uint64_t>(step)));
    const at::Tensor wanted = x.slice(1, 0, 2).prod(1, true) + x.slice(1, 2, 3);
    model->with_whole_weights([&] {
      const at::Tensor loss = torch::mse_loss(net->forward(x, trainer.part(preference)), wanted);
      model->backward(loss);
      losses.push_back(loss.item<double>());
    });
    model->step();
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- speech: a bidirectional LSTM and the CTC loss over recordings and texts of different lengths -------------------

struct RecognizerImpl : nn::Module {
  RecognizerImpl() {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(5, 8).bidirectional(true)));
    out = register_module("out", nn::Linear(16, 6));
    draw_weights(*this, 141);
  }
  at::Tensor forward(const at::Tensor& sound, const at::Tensor& lengths) {  // [time, batch, 5]
    const auto packed = nn::utils::rnn::pack_padded_sequence(sound, lengths, false, /*enforce_sorted=*/false);
    const auto heard = std::get<0>(lstm->forward_with_packed_input(packed));
    const auto padded = std::get<0>(nn::utils::rnn::pad_packed_sequence(heard, false, 0.0, sound.size(0)));
    return torch::log_softmax(out(padded), -1);
  }
  nn::LSTM lstm{nullptr};
  nn::Linear out{nullptr};
};
TORCH_MODULE(Recognizer);

Losses train_recognizer(const Trainer& trainer) {
  Recognizer net;
  const auto model = trainer.train(net.ptr(), {.lr = 1e-2, .clip_norm = 5.0});
  const auto ctc = nn::functional::CTCLossFuncOptions().blank(0);
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(step);
    const at::Tensor texts = trainer.part(1 + integers(5, {kGlobalBatch, 4}, 14200 + seed));
    const at::Tensor text_lengths = trainer.part(2 + integers(3, {kGlobalBatch}, 14300 + seed));
    const at::Tensor sound_lengths = trainer.part(9 + integers(4, {kGlobalBatch}, 14400 + seed));
    const at::Tensor said = torch::one_hot(texts - 1, 5).to(torch::kFloat).repeat_interleave(3, 1);
    const at::Tensor sound = said + 0.2 * trainer.part(normal({kGlobalBatch, 12, 5}, 14500 + seed));
    const at::Tensor chances = net->forward(sound.transpose(0, 1), sound_lengths);
    const at::Tensor loss = nn::functional::ctc_loss(chances, texts, sound_lengths, text_lengths, ctc);
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- direct preference optimization: two answers, the policy, and a reference that it begins as ---------------------

struct WriterImpl : nn::Module {
  WriterImpl() {
    words = register_module("words", nn::Embedding(kVocabulary, 8));
    rnn = register_module("rnn", nn::GRU(nn::GRUOptions(8, 12).batch_first(true)));
    head = register_module("head", nn::Linear(12, kVocabulary));
    draw_weights(*this, 151);
  }
  at::Tensor log_chance(const at::Tensor& text) {  // [batch, length]
    const at::Tensor scores = head(std::get<0>(rnn->forward(words(text.slice(1, 0, -1)))));
    return torch::log_softmax(scores, -1).gather(2, text.slice(1, 1).unsqueeze(2)).sum({1, 2});
  }
  nn::Embedding words{nullptr};
  nn::GRU rnn{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Writer);

Losses train_on_preferences(const Trainer& trainer) {
  Writer policy, reference;
  const auto model = trainer.train(policy.ptr(), {.lr = 3e-3, .clip_norm = 1.0});
  const auto reference_model = trainer.evaluate(reference.ptr());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const at::Tensor both = integers(kVocabulary, {kGlobalBatch, 2, 6}, 15200 + static_cast<uint64_t>(step));
    const at::Tensor texts = trainer.part(std::get<0>(both.sort(2)));
    const at::Tensor chosen = texts.select(1, 0), rejected = texts.select(1, 1).flip(1);
    at::Tensor before;
    {
      const torch::NoGradGuard no_grad;
      before = reference->log_chance(chosen) - reference->log_chance(rejected);
    }
    const at::Tensor margin = policy->log_chance(chosen) - policy->log_chance(rejected) - before;
    const at::Tensor loss = -torch::log_sigmoid(0.3 * margin).mean();
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*policy) + sum_of_weights(*reference));
  return losses;
}

}  // namespace

std::vector<Program> text_programs() {
  return {written_once("Distillation", distill),        written_once("Lora", train_adapters),
          written_once("Seq2Seq", train_translator),    written_once("Experts", train_experts),
          written_once("Recognizer", train_recognizer), written_once("Preferences", train_on_preferences)};
}

}  // namespace ds::engine
