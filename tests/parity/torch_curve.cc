#include "tests/parity/torch_curve.h"

#include <ATen/Parallel.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <map>
#include <memory>
#include <stdexcept>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "examples/gpt/text_corpus.h"
#include "examples/gpt/token_batches.h"

namespace ds::test {
namespace {

constexpr uint64_t kSeed = 1234;
constexpr double kClip = 1.0;

at::ScalarType type_of(const std::string& precision) {
  if (precision == "fp32") return at::kFloat;
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  throw std::runtime_error("curve: expected precision fp32, bf16 or fp16, found " + precision);
}

torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(1e-3).betas({0.9, 0.999}).eps(1e-8).weight_decay(0.01);
}

// Takes the sequences of a step one by one and adds up their gradients, as the jobs do, so that the same kernels run on
// the same shapes: what remains to differ is the engine. Which kernels these are, and how they round, depends on the
// CPU.
class PlainTraining {
 public:
  explicit PlainTraining(const Curve& curve)
      : type_(type_of(curve.precision)),
        loss_scale_(type_ == at::kHalf ? 256.0 : 1.0),
        global_batch_(curve.global_batch),
        model_({.tie_embeddings = curve.tied, .freeze_embeddings = curve.frozen}),
        text_(gpt::TextCorpus::open(DS_SOURCE_DIR "/tests/parity/data/kjv_1m.bin")),
        sequences_(text_, {.order = gpt::Order::kSequential}) {
    gpt::initialize_weights(model_, kSeed);
    for (const at::Tensor& parameter : model_.parameters()) {
      if (parameter.requires_grad()) masters_.push_back(parameter.detach().clone().set_requires_grad(true));
    }
    model_.to(type_);
    for (const at::Tensor& parameter : model_.parameters()) {
      if (parameter.requires_grad()) parameters_.push_back(parameter);
    }
    optimizer_ = std::make_unique<torch::optim::AdamW>(masters_, adamw_options());
  }

  const CurveValues& values() const { return values_; }

  void step() {
    const auto first = static_cast<int64_t>(values_.loss.size()) * global_batch_;
    double loss_sum = 0;
    for (int64_t i = 0; i < global_batch_; ++i) {
      const gpt::TokenBatch sequence = sequences_.get(first + i);
      const at::Tensor loss = model_.forward(sequence.data, sequence.target);
      loss_sum += loss.item<double>();
      (loss * loss_scale_).backward();
      add_gradients();
    }
    values_.loss.push_back(loss_sum / static_cast<double>(global_batch_));
    for (const at::Tensor& master : masters_) {
      master.mutable_grad().div_(loss_scale_ * static_cast<double>(global_batch_));
    }
    values_.grad_norm.push_back(torch::nn::utils::clip_grad_norm_(masters_, kClip));
    optimizer_->step();
    optimizer_->zero_grad();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < masters_.size(); ++i) parameters_[i].copy_(masters_[i]);
  }

 private:
  // The parameters' gradients move to their masters.
  void add_gradients() {
    for (size_t i = 0; i < masters_.size(); ++i) {
      at::Tensor& sum = masters_[i].mutable_grad();
      const at::Tensor gradient = parameters_[i].grad().to(at::kFloat);
      sum = sum.defined() ? sum + gradient : gradient;
      parameters_[i].mutable_grad().reset();
    }
  }

  at::ScalarType type_;
  double loss_scale_;
  int64_t global_batch_;
  gpt::Gpt model_;
  gpt::TextCorpus text_;
  gpt::TokenBatches sequences_;
  std::vector<at::Tensor> parameters_;  // those that are trained
  std::vector<at::Tensor> masters_;     // float32, one for each
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  CurveValues values_;
};

}  // namespace

std::string Curve::name() const {
  return precision + (tied ? "_tied" : "") + (frozen ? "_frozen" : "") + "_batch" + std::to_string(global_batch);
}

const CurveValues& torch_curve(const Curve& curve, size_t steps) {
  static std::map<std::string, std::unique_ptr<PlainTraining>> trainings;
  at::set_num_threads(1);
  std::unique_ptr<PlainTraining>& training = trainings[curve.name()];
  if (!training) training = std::make_unique<PlainTraining>(curve);
  while (training->values().loss.size() < steps) training->step();
  return training->values();
}

}  // namespace ds::test
