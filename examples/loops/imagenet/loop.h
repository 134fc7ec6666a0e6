// The common ground of both loops of this folder: how long they run, their seed, and top-1 accuracy.
#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <string>

#include "resnet.h"
#include "stripes.h"

namespace imagenet {

constexpr int kEpochs = 5;
constexpr int kEpochsUntilDecay = 3;  // then the learning rate is a tenth

// --seed N, or 1 without it. Throws std::invalid_argument for anything else.
inline uint64_t seed_of(int count, char** arguments) {
  if (count == 1) return 1;
  if (count != 3 || std::string(arguments[1]) != "--seed") {
    throw std::invalid_argument("expected --seed N or no arguments, found " + std::string(arguments[1]));
  }
  return std::stoull(arguments[2]);
}

// How many of the images first, first + stride, ... `model` names rightly: a scalar on `device`, for a sum over ranks.
inline torch::Tensor count_top1(ResNet& model, Stripes& images, int64_t first, int64_t stride, torch::Device device) {
  auto right = torch::zeros({}, device);
  const auto count = static_cast<int64_t>(*images.size());
  for (int64_t index = first; index < count; index += stride) {
    const auto image = images.get(static_cast<size_t>(index));
    const auto scores = model->forward(image.data.unsqueeze(0).to(device));
    right += scores.argmax().item<int64_t>() == image.target.item<int64_t>() ? 1 : 0;
  }
  return right;
}

}  // namespace imagenet
