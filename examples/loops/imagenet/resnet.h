// A residual network in the shape of torchvision's ResNet-18, narrow enough for a CPU. Nothing of it knows of ranks.
#pragma once

#include <torch/torch.h>

namespace imagenet {

// Two 3x3 convolutions with BatchNorm, added to what comes in.
struct BasicBlockImpl : torch::nn::Module {
  BasicBlockImpl(int64_t from, int64_t to, int64_t stride);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Sequential body{nullptr};
  torch::nn::Sequential shortcut{nullptr};  // null: shapes agree
};
TORCH_MODULE(BasicBlock);

// [N, 3, H, W] to [N, kinds].
struct ResNetImpl : torch::nn::Module {
  ResNetImpl(int64_t width, int64_t kinds);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Sequential stem{nullptr}, layer1{nullptr}, layer2{nullptr}, layer3{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace imagenet
