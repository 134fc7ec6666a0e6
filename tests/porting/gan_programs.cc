// Two models and two engines: the loop of PyTorch's DCGAN tutorial, and a Wasserstein critic whose gradient penalty is
// differentiated twice.
#include <memory>

#include "tests/model/small_run.h"
#include "tests/porting/programs.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

at::Tensor numbers(int stream, int step, at::IntArrayRef sizes) {
  at::Generator generator = generator_of(static_cast<uint64_t>(10000 * stream + step));
  return torch::randn(sizes, generator);
}

// --- DCGAN -----------------------------------------------------------------------------------------------------------

struct Dcgan {
  Dcgan() {
    draw_weights(*generator, 3);
    draw_weights(*discriminator, 4);
  }
  static nn::ConvTranspose2dOptions up(int64_t inputs, int64_t outputs) {
    return nn::ConvTranspose2dOptions(inputs, outputs, 4).bias(false);
  }
  static nn::Conv2dOptions down(int64_t inputs, int64_t outputs) {
    return nn::Conv2dOptions(inputs, outputs, 4).bias(false);
  }
  nn::Sequential generator{nn::ConvTranspose2d(up(6, 8)), nn::ReLU(),
                           nn::ConvTranspose2d(up(8, 1).stride(2).padding(1)), nn::Tanh()};
  nn::Sequential discriminator{nn::Conv2d(down(1, 8).stride(2).padding(1)),
                               nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)), nn::Conv2d(down(8, 1)),
                               nn::Flatten()};
};

at::Tensor real_images(int step) { return torch::tanh(numbers(1, step, {kGlobalBatch, 1, 8, 8}) * 0.3 + 0.5); }
at::Tensor noise(int step) { return numbers(2, step, {kGlobalBatch, 6, 1, 1}); }

at::Tensor bce(const at::Tensor& logits, double label) {
  return nn::functional::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

Losses train_dcgan_plainly(int /*world*/) {
  Dcgan gan;
  const auto options = torch::optim::AdamOptions(2e-3).betas({0.5, 0.999});
  torch::optim::Adam discriminator(gan.discriminator->parameters(), options);
  torch::optim::Adam generator(gan.generator->parameters(), options);
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    discriminator.zero_grad();
    const at::Tensor of_real = bce(gan.discriminator->forward(real_images(step)), 1);
    of_real.backward();
    const at::Tensor fake = gan.generator->forward(noise(step));
    const at::Tensor of_fake = bce(gan.discriminator->forward(fake.detach()), 0);
    of_fake.backward();
    discriminator.step();
    generator.zero_grad();
    const at::Tensor of_generator = bce(gan.discriminator->forward(fake), 1);
    of_generator.backward();
    generator.step();
    for (const at::Tensor& loss : {of_real, of_fake, of_generator}) losses.push_back(loss.item<double>());
  }
  return losses;
}

Losses train_dcgan_on_engine(comm::Communicator& communicator, const Config& zero) {
  Dcgan gan;
  Config config = adamw_config(zero);
  config["optimizer"] = {{"type", "Adam"}, {"params", {{"lr", 2e-3}, {"betas", {0.5, 0.999}}}}};
  const auto discriminator = start(gan.discriminator.ptr(), config, communicator).engine;
  const auto generator = start(gan.generator.ptr(), config, communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    discriminator->zero_grad();
    const at::Tensor of_real = bce(gan.discriminator->forward(part_of(real_images(step), communicator)), 1);
    discriminator->backward(of_real);
    const at::Tensor fake = gan.generator->forward(part_of(noise(step), communicator));
    const at::Tensor of_fake = bce(gan.discriminator->forward(fake.detach()), 0);
    discriminator->backward(of_fake);
    discriminator->step();
    generator->zero_grad();
    const at::Tensor of_generator = bce(gan.discriminator->forward(fake), 1);
    generator->backward(of_generator);
    generator->step();
    for (const at::Tensor& loss : {of_real, of_fake, of_generator}) losses.push_back(loss.item<double>());
  }
  return losses;
}

// --- WGAN-GP ---------------------------------------------------------------------------------------------------------

constexpr int64_t kPoint = 6;
constexpr int kCriticSteps = 2;

struct Wgan {
  Wgan() {
    draw_weights(*generator, 5);
    draw_weights(*critic, 6);
    // Keeps the generator's loss away from zero, where a relative difference says nothing.
    const torch::NoGradGuard no_grad;
    critic->parameters().back().fill_(1);
  }
  nn::Sequential generator{nn::Linear(4, 16), nn::Tanh(), nn::Linear(16, kPoint)};
  nn::Sequential critic{nn::Linear(kPoint, 16), nn::SiLU(), nn::Linear(16, 16), nn::SiLU(), nn::Linear(16, 1)};
};

struct Points {
  at::Tensor real, noise;  // [batch, kPoint], [batch, 4]
  at::Tensor between;      // [batch, 1], of 0 to 1
};

Points points_of(int draw) {
  return {numbers(3, draw, {kGlobalBatch, kPoint}) * 0.5 + 1.0, numbers(4, draw, {kGlobalBatch, 4}),
          torch::sigmoid(numbers(5, draw, {kGlobalBatch, 1}))};
}

Points points_part(const Points& points, comm::Communicator& ranks) {
  return {part_of(points.real, ranks), part_of(points.noise, ranks), part_of(points.between, ranks)};
}

at::Tensor critic_loss(Wgan& gan, const Points& points) {
  const at::Tensor fake = gan.generator->forward(points.noise).detach();
  const at::Tensor mixed = (points.between * points.real + (1 - points.between) * fake).detach().requires_grad_(true);
  const at::Tensor scores = gan.critic->forward(mixed);
  const at::Tensor slope = torch::autograd::grad({scores}, {mixed}, {torch::ones_like(scores)}, /*retain_graph=*/true,
                                                 /*create_graph=*/true)[0];
  const at::Tensor penalty = (slope.norm(2, 1) - 1).pow(2).mean();
  return gan.critic->forward(fake).mean() - gan.critic->forward(points.real).mean() + 10 * penalty;
}

at::Tensor generator_loss(Wgan& gan, const Points& points) {
  return -gan.critic->forward(gan.generator->forward(points.noise)).mean();
}

Losses train_wgan_plainly(int /*world*/) {
  Wgan gan;
  torch::optim::AdamW critic(gan.critic->parameters(), adamw_options());
  torch::optim::AdamW generator(gan.generator->parameters(), adamw_options());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    for (int i = 0; i < kCriticSteps; ++i) {
      critic.zero_grad();
      const at::Tensor loss = critic_loss(gan, points_of(step * kCriticSteps + i));
      loss.backward();
      critic.step();
      losses.push_back(loss.item<double>());
    }
    generator.zero_grad();
    const at::Tensor loss = generator_loss(gan, points_of(step * kCriticSteps));
    loss.backward();
    generator.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

Losses train_wgan_on_engine(comm::Communicator& communicator, const Config& zero) {
  Wgan gan;
  const auto critic = start(gan.critic.ptr(), adamw_config(zero), communicator).engine;
  const auto generator = start(gan.generator.ptr(), adamw_config(zero), communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    for (int i = 0; i < kCriticSteps; ++i) {
      critic->zero_grad();
      const at::Tensor loss = critic_loss(gan, points_part(points_of(step * kCriticSteps + i), communicator));
      critic->backward(loss);
      critic->step();
      losses.push_back(loss.item<double>());
    }
    generator->zero_grad();
    const at::Tensor loss = generator_loss(gan, points_part(points_of(step * kCriticSteps), communicator));
    generator->backward(loss);
    generator->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

Program dcgan() {
  return {.name = "Dcgan", .train_plainly = train_dcgan_plainly, .train_on_engine = train_dcgan_on_engine};
}

Program wgan_gp() {
  return {.name = "WganGp", .train_plainly = train_wgan_plainly, .train_on_engine = train_wgan_on_engine};
}

}  // namespace ds::engine
