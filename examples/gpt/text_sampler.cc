#include "text_sampler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "splitmix64.h"

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

// Bytes of the character that begins at `i`; 0 where none does that a terminal can show.
size_t character_length(const std::string& text, size_t i) {
  const auto first = static_cast<unsigned char>(text[i]);
  if (first < 0x80) return first == '\n' || first == '\t' || (first >= 0x20 && first != 0x7f) ? 1 : 0;
  const size_t length = first >= 0xc2 && first <= 0xdf   ? 2
                        : (first & 0xf0) == 0xe0         ? 3
                        : first >= 0xf0 && first <= 0xf4 ? 4
                                                         : 0;
  if (i + length > text.size()) return 0;
  for (size_t j = 1; j < length; ++j) {
    if ((static_cast<unsigned char>(text[i + j]) & 0xc0) != 0x80) return 0;
  }
  // Codes that UTF-8 writes shorter, surrogates, control characters of Latin-1, beyond Unicode.
  const auto second = length > 1 ? static_cast<unsigned char>(text[i + 1]) : 0;
  const bool invalid = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                       (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f) ||
                       (first == 0xc2 && second < 0xa0);
  return invalid ? 0 : length;
}

}  // namespace

std::string sample_text(const Logits& logits, const GptConfig& model, at::Device device, const std::string& prompt,
                        const SamplerOptions& options) {
  require(!prompt.empty() && options.temperature > 0,
          "sample_text: expected a prompt and a temperature above 0, found \"", prompt, "\" and ", options.temperature);
  const at::NoGradGuard no_grad;
  const int64_t choices = std::min(kBytes, model.vocab);
  std::string text = prompt;
  for (int64_t i = 0; i < options.length; ++i) {
    const at::Tensor tokens = last_tokens(text, model.seq_len).to(device);
    const at::Tensor scores = logits(tokens).select(1, -1).view({-1}).narrow(0, 0, choices).to(at::kCPU, at::kDouble);
    const auto* values = scores.const_data_ptr<double>();
    const double uniform =
        static_cast<double>(splitmix64(splitmix64(options.seed) + static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    text += static_cast<char>(draw({values, values + choices}, options.temperature, uniform));
  }
  return text;
}

std::string printable(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const size_t length = character_length(text, i);
    result += length == 0 ? "?" : text.substr(i, length);
    i += std::max<size_t>(length, 1);
  }
  return result;
}

}  // namespace gpt
