#include "resnet.h"

namespace imagenet {

namespace nn = torch::nn;

namespace {

nn::Conv2d conv3x3(int64_t from, int64_t to, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, 3).stride(stride).padding(1).bias(false));
}

nn::Sequential make_layer(int64_t from, int64_t to, int64_t stride) {
  return nn::Sequential(BasicBlock(from, to, stride), BasicBlock(to, to, 1));
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(int64_t from, int64_t to, int64_t stride) {
  body = register_module("body", nn::Sequential(conv3x3(from, to, stride), nn::BatchNorm2d(to), nn::ReLU(),
                                                conv3x3(to, to, 1), nn::BatchNorm2d(to)));
  if (stride == 1 && from == to) return;
  shortcut = register_module(
      "shortcut",
      nn::Sequential(nn::Conv2d(nn::Conv2dOptions(from, to, 1).stride(stride).bias(false)), nn::BatchNorm2d(to)));
}

torch::Tensor BasicBlockImpl::forward(const torch::Tensor& x) {
  return torch::relu(body->forward(x) + (shortcut ? shortcut->forward(x) : x));
}

ResNetImpl::ResNetImpl(int64_t width, int64_t kinds) {
  stem = register_module("stem", nn::Sequential(conv3x3(3, width, 1), nn::BatchNorm2d(width), nn::ReLU()));
  layer1 = register_module("layer1", make_layer(width, width, 1));
  layer2 = register_module("layer2", make_layer(width, 2 * width, 2));
  layer3 = register_module("layer3", make_layer(2 * width, 4 * width, 2));
  fc = register_module("fc", nn::Linear(4 * width, kinds));
}

torch::Tensor ResNetImpl::forward(const torch::Tensor& x) {
  const torch::Tensor features = layer3->forward(layer2->forward(layer1->forward(stem->forward(x))));
  return fc(features.mean(std::vector<int64_t>{2, 3}));
}

}  // namespace imagenet
