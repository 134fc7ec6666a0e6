// Images that are drawn: what both programs of this folder learn from, so that they run anywhere.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

namespace imagenet {

constexpr int64_t kKinds = 4;
constexpr int64_t kPixels = 16;

// Stripes in one of four directions, in noise; brightness and contrast differ from image to image.
class Stripes : public torch::data::datasets::Dataset<Stripes> {
 public:
  Stripes(size_t size, uint64_t seed) : size_(size), seed_(seed) {}

  torch::data::Example<> get(size_t index) override {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed_ + index);  // the same sample on every rank
    const auto kind = static_cast<int64_t>(index) % kKinds;
    const double angle = M_PI * static_cast<double>(kind) / kKinds;
    const auto drawn = torch::rand({3}, random);
    const auto line = torch::arange(kPixels, torch::kFloat);
    const auto along = line.view({-1, 1}) * std::cos(angle) + line * std::sin(angle);
    const auto wave = torch::sin(along * 1.5 + drawn[0] * 2 * M_PI) * (drawn[1] + 0.5) + drawn[2] * 4;
    return {wave.expand({3, kPixels, kPixels}) + torch::randn({3, kPixels, kPixels}, random) * 0.3,
            torch::tensor(kind)};
  }
  torch::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
  uint64_t seed_;
};

}  // namespace imagenet
