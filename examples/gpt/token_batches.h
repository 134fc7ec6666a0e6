// Batches of token sequences from a text.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <dsengine/efficiency.h>

#include "text_corpus.h"

namespace gpt {

enum class Order : uint8_t {
  kSequential,  // one sequence behind the other, from the beginning of the text again at its end
  kRandom,      // each sequence from a place of its own, drawn from (seed, number of the sequence)
};

struct BatchOptions {
  Order order = Order::kRandom;
  int64_t batch_size = 1;  // sequences of one micro-batch of one rank
  int64_t seq_len = 128;
  int64_t vocab = 256;  // tokens must be below
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;
  at::Device device = at::kCPU;
  std::shared_ptr<const ds::engine::Curriculum> curriculum = nullptr;  // cuts sequences to its difficulty
  // Chooses sequences in place of `order`, of those that begin at multiples of seq_len: sequences_of().
  std::shared_ptr<ds::engine::DataSampler> sampler = nullptr;
};

// How many sequences one behind the other there are, each with the token that follows: as ds-tool analyze counts them.
int64_t sequences_of(const TextCorpus& corpus, int64_t seq_len);

struct TokenBatch {
  at::Tensor data;    // int64 [batch_size, seq_len], or what the curriculum leaves of it
  at::Tensor target;  // the same, one token later
};

// Sequences of a run are numbered over all ranks: sequence b of rank r in the micro-batch that begins with number n0 is
// n = n0 + r * B + b. In a run that keeps its ranks W and micro-batch B, micro-batch s begins with n0 = s * W * B, so n
// = (s * W + r) * B + b. Ranks never share a sequence; a run with more ranks or a larger micro-batch sees the same ones
// in fewer steps, and a run that goes on with other ranks sees those that come next. With a sampler each new `first` is
// the next micro-batch of it, whatever the number. A sequence starts at (n * T) mod
// (length - T - 1) in sequential order, at splitmix64(splitmix64(seed) + n) mod (length - T) in random order.
class TokenBatches {
 public:
  // Throws ds::ConfigError when the text is too short for one sequence. `corpus` outlives this.
  TokenBatches(TextCorpus& corpus, const BatchOptions& options);

  // This rank's part of the micro-batch that begins with sequence number `first`; without a sampler any one, in any
  // order.
  TokenBatch get(int64_t first);
  // Tokens of a sequence in the step that runs.
  int64_t seq_len() const;
  // Where sequence b of it starts in the text.
  int64_t offset(int64_t first, int64_t b) const;
  // The name of a micro-batch in reports: "text from bytes 17, 4711".
  std::string name(int64_t first) const;

 private:
  // The samples that the sampler chose for the micro-batch that begins with `first`.
  const std::vector<int64_t>& sampled(int64_t first) const;

  TextCorpus& corpus_;
  BatchOptions options_;
  mutable std::vector<int64_t> sampled_;
  mutable int64_t sampled_first_ = -1;
  std::vector<uint8_t> bytes_;
};

}  // namespace gpt
