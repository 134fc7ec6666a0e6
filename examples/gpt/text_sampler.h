// Text from a trained model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "gpt_model.h"

namespace gpt {

struct SamplerOptions {
  int64_t length = 400;      // bytes to append to the prompt
  double temperature = 0.8;  // below 1: likelier bytes more often than the model says
  uint64_t seed = 1234;      // the same seed, weights and prompt give the same text
};

// int64 [1, time] -> [1, time, vocab].
using Logits = std::function<at::Tensor(const at::Tensor& tokens)>;

// Samples byte by byte; the last seq_len bytes are the context. Returns prompt and continuation. `prompt` must not be
// empty. Every rank that shares parameters with others must call it (the forwards are the same on all).
std::string sample_text(const Logits& logits, const GptConfig& model, at::Device device, const std::string& prompt,
                        const SamplerOptions& options);

// The text as UTF-8 that a terminal can show: bytes that are no UTF-8, and control characters but line end and tab,
// become '?'.
std::string printable(const std::string& text);

}  // namespace gpt
