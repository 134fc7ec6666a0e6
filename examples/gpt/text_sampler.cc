#include "examples/gpt/text_sampler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "examples/gpt/splitmix64.h"

namespace gpt {
namespace {

constexpr int64_t kBytes = 256;

at::Tensor last_tokens(const std::string& text, int64_t limit) {
  const auto count = std::min<int64_t>(limit, static_cast<int64_t>(text.size()));
  at::Tensor tokens = at::empty({1, count}, at::kLong);
  auto* values = tokens.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<unsigned char>(text[text.size() - static_cast<size_t>(count - i)]);
  }
  return tokens;
}

// Draws an index with probability proportional to exp(scores / temperature); 0 <= uniform < 1.
size_t draw(const std::vector<double>& scores, double temperature, double uniform) {
  const double highest = *std::max_element(scores.begin(), scores.end());
  std::vector<double> sums;
  double sum = 0.0;
  for (const double score : scores) sums.push_back(sum += std::exp((score - highest) / temperature));
  const auto found = std::upper_bound(sums.begin(), sums.end(), uniform * sum);
  return std::min(static_cast<size_t>(found - sums.begin()), scores.size() - 1);
}

}  // namespace

std::string sample_text(const Gpt& model, at::Device device, const std::string& prompt, const SamplerOptions& options) {
  ds::require(!prompt.empty() && options.temperature > 0,
              "sample_text: expected a prompt and a temperature above 0, found \"", prompt, "\" and ",
              options.temperature);
  const at::NoGradGuard no_grad;
  const int64_t choices = std::min(kBytes, model.config().vocab);
  std::string text = prompt;
  for (int64_t i = 0; i < options.length; ++i) {
    const at::Tensor tokens = last_tokens(text, model.config().seq_len).to(device);
    const at::Tensor scores =
        model.logits(tokens).select(1, -1).view({-1}).narrow(0, 0, choices).to(at::kCPU, at::kDouble);
    const auto* values = scores.const_data_ptr<double>();
    const double uniform =
        static_cast<double>(splitmix64(splitmix64(options.seed) + static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    text += static_cast<char>(draw({values, values + choices}, options.temperature, uniform));
  }
  return text;
}

std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f; }, '?');
  return text;
}

}  // namespace gpt
