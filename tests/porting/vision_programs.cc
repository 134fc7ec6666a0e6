// Programs about images: diffusion with averaged weights, a vision transformer (alone and as a pipeline), a variational
// autoencoder with BatchNorm, inference in 16 bits, and a masked autoencoder.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/pipeline.h"
#include "tests/model/small_run.h"
#include "tests/porting/trainer.h"

namespace ds::engine {
namespace {

namespace nn = torch::nn;

nn::Conv2dOptions same_size(int64_t inputs, int64_t outputs) {
  return nn::Conv2dOptions(inputs, outputs, 3).padding(1);
}

// Two blobs on a grid of 8 x 8.
at::Tensor blobs(int64_t count, uint64_t seed) {
  const at::Tensor centers = uniform({count, 4, 1, 1}, seed) * 8;
  const at::Tensor x = torch::arange(8, torch::kFloat);
  const auto blob = [&](int64_t i) {
    return (-((x.view({8, 1}) - centers.select(1, i)).pow(2) + (x - centers.select(1, i + 1)).pow(2)) / 4).exp();
  };
  return (blob(0) + blob(2)).unsqueeze(1);
}

// --- diffusion: a U-Net, accumulation, clipping, and averaged weights that are swapped in for samples ---------------

constexpr int64_t kNoiseLevels = 20;

struct UnetBlockImpl : nn::Module {
  UnetBlockImpl(int64_t inputs, int64_t outputs) {
    conv = register_module("conv", nn::Conv2d(same_size(inputs, outputs)));
    norm = register_module("norm", nn::GroupNorm(4, outputs));
    time = register_module("time", nn::Linear(8, outputs));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& t) {
    return torch::silu(norm(conv(x))) + time(t).unsqueeze(-1).unsqueeze(-1);
  }
  nn::Conv2d conv{nullptr};
  nn::GroupNorm norm{nullptr};
  nn::Linear time{nullptr};
};
TORCH_MODULE(UnetBlock);

struct UnetImpl : nn::Module {
  UnetImpl() {
    down = register_module("down", UnetBlock(1, 8));
    middle = register_module("middle", UnetBlock(8, 8));
    up = register_module("up", UnetBlock(16, 8));
    out = register_module("out", nn::Conv2d(nn::Conv2dOptions(8, 1, 1)));
    frequencies = register_buffer("frequencies", torch::exp(-torch::arange(4, torch::kFloat)));
    draw_weights(*this, 61);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& level) {
    const at::Tensor angle = level.to(torch::kFloat).unsqueeze(1) * frequencies;
    const at::Tensor t = torch::cat({angle.sin(), angle.cos()}, 1);
    const at::Tensor fine = down(x, t);
    const at::Tensor coarse = middle(torch::avg_pool2d(fine, 2), t);
    return out(up(torch::cat({torch::upsample_nearest2d(coarse, {8, 8}), fine}, 1), t));
  }
  UnetBlock down{nullptr}, middle{nullptr}, up{nullptr};
  nn::Conv2d out{nullptr};
  at::Tensor frequencies;
};
TORCH_MODULE(Unet);

double sample_of(Unet& net, const at::Tensor& signal) {
  at::Tensor x = normal({2, 1, 8, 8}, 62);
  for (int64_t level = kNoiseLevels - 1; level >= 0; level -= 6) {
    const double now = signal[level].item<double>();
    const double next = level >= 6 ? signal[level - 6].item<double>() : 1.0;
    const at::Tensor noise = net->forward(x, torch::full({2}, level));
    const at::Tensor clean = ((x - std::sqrt(1 - now) * noise) / std::sqrt(now)).clamp(-2, 2);
    x = std::sqrt(next) * clean + std::sqrt(1 - next) * noise;
  }
  return x.abs().mean().item<double>();
}

Losses train_diffusion(const Trainer& trainer) {
  Unet net;
  const auto model = trainer.train(net.ptr(), {.lr = 2e-3, .clip_norm = 1.0, .accumulation = 2});
  const at::Tensor signal = torch::cumprod(1 - torch::linspace(1e-3, 0.3, kNoiseLevels), 0);
  std::vector<at::Tensor> averages;
  for (const at::Tensor& parameter : net->parameters()) averages.push_back(parameter.detach().clone());
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const std::vector<at::Tensor> images = trainer.part(blobs(kGlobalBatch, 6300 + step)).chunk(2);
    const std::vector<at::Tensor> noise = trainer.part(normal({kGlobalBatch, 1, 8, 8}, 6400 + step)).chunk(2);
    const std::vector<at::Tensor> level = trainer.part(integers(kNoiseLevels, {kGlobalBatch}, 6500 + step)).chunk(2);
    double mean = 0;
    for (size_t micro = 0; micro < 2; ++micro) {
      const at::Tensor share = signal.index_select(0, level[micro]).view({-1, 1, 1, 1});
      const at::Tensor mixed = share.sqrt() * images[micro] + (1 - share).sqrt() * noise[micro];
      const at::Tensor loss = torch::mse_loss(net->forward(mixed, level[micro]), noise[micro]);
      model->backward(loss);
      model->step();
      mean += loss.item<double>() / 2;
    }
    losses.push_back(mean);
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) averages[i].lerp_(parameters[i], 0.1);
    if (step % 4 != 3) continue;
    std::vector<at::Tensor> own;
    for (size_t i = 0; i < parameters.size(); ++i) {
      own.push_back(parameters[i].clone());
      parameters[i].copy_(averages[i]);
    }
    losses.push_back(sample_of(net, signal));
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(own[i]);
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

// --- a vision transformer -------------------------------------------------------------------------------------------

constexpr int64_t kWidth = 16;
constexpr int kBlocks = 2;
constexpr uint64_t kVitSeed = 71;

struct VitEmbedImpl : nn::Module {
  VitEmbedImpl() {
    patch = register_module("patch", nn::Conv2d(nn::Conv2dOptions(1, kWidth, 4).stride(4)));
    draw_weights(*this, kVitSeed);
    token = register_parameter("token", torch::zeros({1, 1, kWidth}));
    place = register_parameter("place", 0.1 * normal({1, 5, kWidth}, kVitSeed + 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::cat({token.expand({x.size(0), 1, kWidth}), patch(x).flatten(2).transpose(1, 2)}, 1) + place;
  }
  nn::Conv2d patch{nullptr};
  at::Tensor token, place;
};
TORCH_MODULE(VitEmbed);

struct VitBlockImpl : nn::Module {
  explicit VitBlockImpl(int number) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    proj = register_module("proj", nn::Linear(kWidth, kWidth));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    fc1 = register_module("fc1", nn::Linear(kWidth, 2 * kWidth));
    fc2 = register_module("fc2", nn::Linear(2 * kWidth, kWidth));
    draw_weights(*this, kVitSeed + 10 + static_cast<uint64_t>(number));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor q = qkv(norm1(x)).view({x.size(0), x.size(1), 3, 2, kWidth / 2}).permute({2, 0, 3, 1, 4});
    const at::Tensor seen = at::scaled_dot_product_attention(q[0], q[1], q[2]);
    const at::Tensor h = x + proj(seen.transpose(1, 2).reshape(x.sizes()));
    return h + fc2(torch::gelu(fc1(norm2(h))));
  }
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, proj{nullptr}, fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(VitBlock);

struct VitHeadImpl : nn::Module {
  VitHeadImpl() {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    out = register_module("out", nn::Linear(kWidth, 5));
    draw_weights(*this, kVitSeed + 2);
  }
  at::Tensor forward(const at::Tensor& x) { return out(norm(x).select(1, 0)); }
  nn::LayerNorm norm{nullptr};
  nn::Linear out{nullptr};
};
TORCH_MODULE(VitHead);

at::Tensor cross_entropy(const at::Tensor& scores, const at::Tensor& labels) {
  return torch::cross_entropy_loss(scores, labels);
}

struct MarkedImages {
  at::Tensor images, labels;
};

MarkedImages labelled_images(int step) {
  const at::Tensor images = normal({kGlobalBatch, 1, 8, 8}, 7500 + static_cast<uint64_t>(step));
  return {images, (images.mean({1, 2, 3}) * 40).floor().to(torch::kLong).remainder(5)};
}

Losses train_vit(const Trainer& trainer) {
  nn::Sequential net;
  net->push_back(VitEmbed());
  for (int i = 0; i < kBlocks; ++i) net->push_back(VitBlock(i));
  net->push_back(VitHead());
  const auto model = trainer.train(net.ptr(), {.clip_norm = 1.0});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto [images, labels] = labelled_images(step);
    const at::Tensor loss = cross_entropy(net->forward(trainer.part(images)), trainer.part(labels));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

Recipe pipeline_recipe(int ranks) {
  const int stages = std::min(2, ranks);
  const int micro_batch = kGlobalBatch * stages / ranks / 2;
  const Config keys = {{"train_micro_batch_size_per_gpu", micro_batch}, {"pipeline", {{"stages", stages}}}};
  return {.clip_norm = 1.0, .accumulation = 2, .keys = keys};
}

// Trains the same model as a pipeline over two ranks, or over one where there is one.
Losses train_vit_in_a_pipeline(comm::Communicator& communicator, const Config& zero) {
  using pipeline::LayerSpec;
  std::vector<LayerSpec> layers{LayerSpec::of<VitEmbed>()};
  for (int i = 0; i < kBlocks; ++i) layers.push_back(LayerSpec::of<VitBlock>(i).named("block" + std::to_string(i)));
  layers.push_back(LayerSpec::of<VitHead>());
  const Recipe recipe = pipeline_recipe(communicator.size());
  const auto net = std::make_shared<pipeline::PipelineModule>(layers, pipeline::PipelineOptions{.loss = cross_entropy});
  const auto engine = start(net, Trainer(communicator, zero).config(recipe), communicator).engine;
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto [images, labels] = labelled_images(step);
    const auto inputs = part_of(images, engine->communicator()).chunk(2);
    const auto targets = part_of(labels, engine->communicator()).chunk(2);
    size_t micro = 0;
    const auto next = [&]() -> pipeline::MicroBatch {
      const size_t own = micro++;
      return {.inputs = {inputs[own]}, .labels = {targets[own]}};
    };
    losses.push_back(engine->train_batch(next).item<double>());
  }
  double weights = 0;
  for (const auto& [name, weight] : engine->fp32_state_dict())
    weights += weight.to(torch::kDouble).abs().sum().item<double>();
  losses.push_back(weights * std::min(2, communicator.size()));  // the mean over ranks is the model's
  return losses;
}

// --- a variational autoencoder with BatchNorm over all ranks --------------------------------------------------------

struct VaeImpl : nn::Module {
  VaeImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).stride(2).padding(1)));
    norm1 = register_module("norm1", nn::BatchNorm2d(8));
    code = register_module("code", nn::Linear(128, 8));
    hidden = register_module("hidden", nn::Linear(4, 32));
    norm2 = register_module("norm2", nn::BatchNorm1d(32));
    out = register_module("out", nn::Linear(32, 64));
    draw_weights(*this, 81);
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& noise) {
    const std::vector<at::Tensor> codes = code(torch::relu(norm1(conv(x))).flatten(1)).chunk(2, 1);
    const at::Tensor spread = codes[1].clamp(-6, 6);
    const at::Tensor drawn = codes[0] + (0.5 * spread).exp() * noise;
    const at::Tensor image = out(torch::relu(norm2(hidden(drawn))));
    const at::Tensor divergence = -0.5 * (1 + spread - codes[0].pow(2) - spread.exp()).sum(1).mean();
    return (image - x.flatten(1)).pow(2).sum(1).mean() + 0.1 * divergence;
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm1{nullptr};
  nn::BatchNorm1d norm2{nullptr};
  nn::Linear code{nullptr}, hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(Vae);

Losses train_vae(const Trainer& trainer) {
  Vae net;
  const auto model = trainer.train(net.ptr(), {.clip_norm = 1.0, .keys = {{"sync_batchnorm", true}}});
  Losses losses;
  const auto loss_of = [&](uint64_t step) {
    return net->loss(trainer.part(blobs(kGlobalBatch, 8200 + step)),
                     trainer.part(normal({kGlobalBatch, 4}, 8300 + step)));
  };
  for (uint64_t step = 0; step < kProgramSteps; ++step) {
    const at::Tensor loss = loss_of(step);
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  const torch::NoGradGuard no_grad;
  net->eval();
  losses.push_back(loss_of(100).item<double>());
  double buffers = 0;
  for (const at::Tensor& buffer : net->buffers()) buffers += buffer.to(torch::kDouble).abs().sum().item<double>();
  losses.push_back(buffers);
  return losses;
}

// --- inference by another program, in several precisions, from a file of 16 or 32 bits ------------------------------

struct ClassifierImpl : nn::Module {
  ClassifierImpl() {
    conv = register_module("conv", nn::Conv2d(same_size(1, 8)));
    norm = register_module("norm", nn::BatchNorm2d(8));
    out = register_module("out", nn::Linear(128, 4));
    mean = register_buffer("mean", torch::tensor(0.1F));
    draw_weights(*this, 91);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out(torch::max_pool2d(torch::relu(norm(conv(x - mean))), 2).flatten(1));
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear out{nullptr};
  at::Tensor mean;
};
TORCH_MODULE(Classifier);

// A bright quarter of the image is the class.
MarkedImages quarters(int64_t count, uint64_t seed) {
  const at::Tensor labels = integers(4, {count}, seed);
  const at::Tensor bright = torch::one_hot(labels, 4).to(torch::kFloat).view({count, 1, 2, 2});
  return {0.3 * normal({count, 1, 8, 8}, seed + 500) + torch::upsample_nearest2d(bright, {8, 8}), labels};
}

double accuracy_of(Classifier& net, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto [images, labels] = quarters(64, 9200);
  return net->forward(images.to(dtype)).argmax(1).eq(labels).to(torch::kDouble).mean().item<double>();
}

void round_to_int8(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& weight : model.parameters()) {
    if (weight.dim() < 2) continue;
    const at::Tensor scale = (weight.flatten(1).abs().amax(1) / 127).to(torch::kDouble);
    const at::Tensor zeros = torch::zeros_like(scale, torch::kLong);
    weight.copy_(at::quantize_per_channel(weight, scale, zeros, 0, torch::kQInt8).dequantize());
  }
}

// The accuracies of a program that reads the file, and knows nothing of engines.
Losses infer_from(const std::string& path) {
  Losses accuracies;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kChar}) {
    Classifier net;
    checkpoint::load_module(*checkpoint::open_weights(path), *net);
    if (dtype == at::kChar) round_to_int8(*net);
    const at::ScalarType computed = dtype == at::kChar ? at::kFloat : dtype;
    net->to(computed);
    accuracies.push_back(accuracy_of(net, computed));
  }
  return accuracies;
}

Losses train_classifier(const Trainer& trainer, const Recipe& recipe) {
  Classifier net;
  const auto model = trainer.train(net.ptr(), recipe);
  const at::ScalarType dtype = net->conv->weight.scalar_type();
  Losses losses;
  for (int step = 0; step < 2 * kProgramSteps; ++step) {
    const auto [images, labels] = quarters(2 * kGlobalBatch, 9300 + static_cast<uint64_t>(step));
    const at::Tensor scores = net->forward(trainer.part(images).to(dtype)).to(torch::kFloat);
    const at::Tensor loss = cross_entropy(scores, trainer.part(labels));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  const Losses accuracies = infer_from(model->save("classifier.safetensors"));
  losses.insert(losses.end(), accuracies.begin(), accuracies.end());
  return losses;
}

Losses train_and_infer(const Trainer& trainer) {
  return train_classifier(trainer, {.lr = 1e-2, .clip_norm = 1.0, .keys = {{"sync_batchnorm", true}}});
}

// The curve is that of 16 bits, so that the accuracies alone are compared.
Losses train_in_bf16_and_infer(const Trainer& trainer) {
  const Losses all = train_classifier(
      trainer, {.lr = 1e-2, .clip_norm = 1.0, .keys = {{"sync_batchnorm", true}, {"bf16", {{"enabled", true}}}}});
  Losses result{0.0};
  result.insert(result.end(), all.end() - 4, all.end());
  return result;
}

// --- a masked autoencoder: patches in an order that is drawn, most of them hidden, and one weight used twice --------

constexpr int64_t kPatches = 16;
constexpr int64_t kShown = 4;
constexpr int64_t kPixels = 4;  // of a patch

struct MaskedAutoencoderImpl : nn::Module {
  MaskedAutoencoderImpl() {
    embed = register_module("embed", nn::Linear(nn::LinearOptions(kPixels, kWidth).bias(false)));
    encoder = register_module("encoder", VitBlock(5));
    decoder = register_module("decoder", VitBlock(6));
    draw_weights(*this, 96);
    hidden = register_parameter("hidden", 0.1 * normal({1, 1, kWidth}, 97));
    place = register_parameter("place", 0.5 * normal({kPatches, kWidth}, 98));
  }
  at::Tensor loss(const at::Tensor& patches, const at::Tensor& noise) {  // [batch, patches, pixels], [batch, patches]
    const at::Tensor order = noise.argsort(1, /*descending=*/false);
    const at::Tensor place_of = order.argsort(1, /*descending=*/false);
    const auto picked = [](const at::Tensor& from, const at::Tensor& at) {
      return from.gather(1, at.unsqueeze(-1).expand({-1, -1, from.size(2)}));
    };
    const at::Tensor shown = encoder(picked(embed(patches) + place, order.slice(1, 0, kShown)));
    const at::Tensor missing = hidden.expand({patches.size(0), kPatches - kShown, kWidth});
    const at::Tensor whole = picked(torch::cat({shown, missing}, 1), place_of) + place;
    const at::Tensor image = torch::matmul(decoder(whole), embed->weight);
    const at::Tensor was_hidden = place_of.ge(kShown).unsqueeze(-1);
    return ((image - patches).pow(2) * was_hidden).sum() / (patches.size(0) * (kPatches - kShown) * kPixels);
  }
  nn::Linear embed{nullptr};  // its transpose makes pixels again
  VitBlock encoder{nullptr}, decoder{nullptr};
  at::Tensor hidden, place;
};
TORCH_MODULE(MaskedAutoencoder);

Losses train_masked_autoencoder(const Trainer& trainer) {
  MaskedAutoencoder net;
  const auto model = trainer.train(net.ptr(), {.lr = 3e-3, .clip_norm = 1.0});
  Losses losses;
  for (int step = 0; step < kProgramSteps; ++step) {
    const auto seed = static_cast<uint64_t>(step);
    const at::Tensor patches = blobs(kGlobalBatch, 9800 + seed).view({kGlobalBatch, kPatches, kPixels});
    const at::Tensor loss =
        net->loss(trainer.part(patches), trainer.part(uniform({kGlobalBatch, kPatches}, 9900 + seed)));
    model->backward(loss);
    model->step();
    losses.push_back(loss.item<double>());
  }
  losses.push_back(sum_of_weights(*net));
  return losses;
}

}  // namespace

std::vector<Program> vision_programs() {
  // The bound of the autoencoder with BatchNorm is wide because a bias before a BatchNorm has a gradient of rounding
  // alone, which AdamW scales up to a step of its rate. The loss does not see such a bias in training, but the running
  // means, and with them the evaluation, do. One rank differs from the plain loop by as much.
  constexpr double kBiasesOfRounding = 5e-4;
  Program in_a_pipeline = written_once("VitPipeline", train_vit);
  in_a_pipeline.train_on_engine = train_vit_in_a_pipeline;
  in_a_pipeline.config = [](int ranks, const Config& zero) {
    return Trainer::that_finds_config(zero).config(pipeline_recipe(ranks));
  };
  return {written_once("Diffusion", train_diffusion),
          written_once("Vit", train_vit),
          in_a_pipeline,
          written_once("Vae", train_vae, kBiasesOfRounding),
          written_once("Inference", train_and_infer, kBiasesOfRounding),
          written_once("InferenceBf16", train_in_bf16_and_infer),
          written_once("MaskedAutoencoder", train_masked_autoencoder)};
}

}  // namespace ds::engine
