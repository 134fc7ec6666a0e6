// A model of equal square layers, and what a process may hold of it.
#pragma once

#include <sys/resource.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/text.h"

namespace ds::engine {

// As torch::nn::Linear, on any device; on the meta device without values.
struct SquareLayerImpl : torch::nn::Module {
  SquareLayerImpl(int64_t width, at::Device device)
      : weight(register_parameter("weight", torch::empty({width, width}, at::TensorOptions(device)))) {
    if (!device.is_meta()) torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::nn::functional::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(SquareLayer);

struct LargeNetImpl : torch::nn::Module {
  LargeNetImpl(int64_t width, int64_t depth, at::Device device = at::kCPU) {
    for (int64_t i = 0; i < depth; ++i) layers.push_back(register_module(cat("layer", i), SquareLayer(width, device)));
  }
  at::Tensor loss(at::Tensor x) {
    for (auto& layer : layers) x = x + torch::tanh(layer(x));
    return (x - 1.0).pow(2).mean();
  }
  std::vector<SquareLayer> layers;
};
TORCH_MODULE(LargeNet);

// [2, width], another one on each rank.
inline at::Tensor large_input(int64_t width, int rank) {
  return torch::sin(torch::arange(2 * width) * 0.01 + rank).view({2, width});
}

// A line of /proc/self/status, which is in KiB, in bytes: "VmData" is private writable memory, "RssAnon" that of it
// which has pages.
inline int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  throw std::runtime_error("/proc/self/status has no " + field);
}

// From now on this process may map so many bytes more of private writable memory.
inline void limit_further_memory(int64_t bytes) {
  const auto limit = static_cast<rlim_t>(status_bytes("VmData") + bytes);
  const rlimit bounds = {limit, limit};
  if (setrlimit(RLIMIT_DATA, &bounds) != 0) throw std::runtime_error("setrlimit(RLIMIT_DATA) failed");
}

}  // namespace ds::engine
