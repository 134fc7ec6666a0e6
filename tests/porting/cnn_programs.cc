// A residual network on small images: with GroupNorm, and with BatchNorm.
#include <algorithm>

#include "tests/model/small_run.h"
#include "tests/porting/programs.h"

namespace ds::engine {
namespace {

torch::nn::GroupNorm norm_over(int64_t channels, const torch::nn::GroupNorm&) {
  return torch::nn::GroupNorm(torch::nn::GroupNormOptions(4, channels));
}
torch::nn::BatchNorm2d norm_over(int64_t channels, const torch::nn::BatchNorm2d&) {
  return torch::nn::BatchNorm2d(channels);
}

torch::nn::Conv2d convolution(int64_t inputs, int64_t outputs, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(inputs, outputs, kernel).stride(stride).padding(kernel / 2).bias(false));
}

template <class Norm>
struct Block : torch::nn::Module {
  Block(int64_t inputs, int64_t outputs, int64_t stride)
      : conv1(register_module("conv1", convolution(inputs, outputs, 3, stride))),
        conv2(register_module("conv2", convolution(outputs, outputs, 3, 1))),
        shortcut(register_module("shortcut", convolution(inputs, outputs, 1, stride))),
        norm1(register_module("norm1", norm_over(outputs, Norm{nullptr}))),
        norm2(register_module("norm2", norm_over(outputs, Norm{nullptr}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::relu(norm2(conv2(torch::relu(norm1(conv1(x))))) + shortcut(x));
  }
  torch::nn::Conv2d conv1, conv2, shortcut;
  Norm norm1, norm2;
};

constexpr int64_t kClasses = 5;

template <class Norm>
struct ResidualNet : torch::nn::Module {
  ResidualNet()
      : first(register_module("first", std::make_shared<Block<Norm>>(3, 8, 1))),
        second(register_module("second", std::make_shared<Block<Norm>>(8, 16, 2))),
        head(register_module("head", torch::nn::Linear(16, kClasses))) {
    draw_weights(*this, 1);
  }
  at::Tensor loss(const at::Tensor& images, const at::Tensor& labels) {
    const at::Tensor pooled = second->forward(first->forward(images)).mean({2, 3});
    return torch::nn::functional::cross_entropy(head(pooled), labels);
  }
  std::shared_ptr<Block<Norm>> first, second;
  torch::nn::Linear head;
};

struct LabelledImages {
  at::Tensor pixels;  // [kGlobalBatch, 3, 8, 8]
  at::Tensor labels;  // [kGlobalBatch]
};

LabelledImages images_of(int step) {
  at::Generator generator = generator_of(1000 + static_cast<uint64_t>(step));
  const at::Tensor labels = torch::randint(kClasses, {kGlobalBatch}, generator, torch::kLong);
  const at::Tensor pixels = torch::randn({kGlobalBatch, 3, 8, 8}, generator);
  // What tells the classes apart: a brighter row.
  for (int64_t i = 0; i < kGlobalBatch; ++i) pixels[i].select(1, labels[i].item<int64_t>()) += 1.0;
  return {pixels, labels};
}

template <class Norm>
Losses train_cnn_on_engine(comm::Communicator& communicator, const Config& zero) {
  const auto model = std::make_shared<ResidualNet<Norm>>();
  const auto engine = start(model, adamw_config(zero), communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const LabelledImages images = images_of(step);
    const at::Tensor loss = model->loss(part_of(images.pixels, communicator), part_of(images.labels, communicator));
    engine->backward(loss);
    engine->step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

Losses train_cnn_plainly(int /*world*/) {
  ResidualNet<torch::nn::GroupNorm> model;
  torch::optim::AdamW optimizer(model.parameters(), adamw_options());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const LabelledImages images = images_of(step);
    optimizer.zero_grad();
    const at::Tensor loss = model.loss(images.pixels, images.labels);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

Program residual_cnn() {
  return {.name = "ResidualCnn",
          .train_plainly = train_cnn_plainly,
          .train_on_engine = train_cnn_on_engine<torch::nn::GroupNorm>};
}

Losses train_batch_norm_plainly(int world, int reordered) {
  ResidualNet<torch::nn::BatchNorm2d> model;
  torch::optim::AdamW optimizer(model.parameters(), adamw_options());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const LabelledImages images = images_of(step);
    std::vector<at::Tensor> pixels = images.pixels.chunk(world);
    std::vector<at::Tensor> labels = images.labels.chunk(world);
    optimizer.zero_grad();
    double total = 0;
    for (int i = 0; i < world; ++i) {
      const auto part = static_cast<size_t>(reordered > 0 ? (world - 1 - i + reordered) % world : i);
      const at::Tensor loss = model.loss(pixels[part].roll(reordered, 0), labels[part].roll(reordered, 0)) / world;
      loss.backward();
      total += loss.item<double>();
    }
    optimizer.step();
    losses.push_back(total);
  }
  return losses;
}

Losses train_batch_norm_on_engine(comm::Communicator& communicator, const Config& zero) {
  return train_cnn_on_engine<torch::nn::BatchNorm2d>(communicator, zero);
}

}  // namespace ds::engine
