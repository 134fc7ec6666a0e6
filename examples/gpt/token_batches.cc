#include "token_batches.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "check.h"
#include "splitmix64.h"

namespace gpt {

int64_t sequences_of(const TextCorpus& corpus, int64_t seq_len) { return (corpus.size() - 1) / seq_len; }

TokenBatches::TokenBatches(TextCorpus& corpus, const BatchOptions& options)
    : corpus_(corpus), options_(options), bytes_(static_cast<size_t>(options.seq_len + 1)) {
  require<ds::ConfigError>(corpus.size() >= options.seq_len + 2, corpus.path(), ": --seq_len ", options.seq_len,
                           " needs a text of ", options.seq_len + 2, " bytes at least, found ", corpus.size());
}

const std::vector<int64_t>& TokenBatches::sampled(int64_t first) const {
  if (first == sampled_first_) return sampled_;
  sampled_ = options_.sampler->next_batch();
  if (sampled_.empty()) sampled_ = options_.sampler->next_batch();  // of the next epoch
  sampled_first_ = first;
  return sampled_;
}

int64_t TokenBatches::offset(int64_t first, int64_t b) const {
  if (options_.sampler) return sampled(first).at(static_cast<size_t>(b)) * options_.seq_len;
  const int64_t number = first + options_.rank * options_.batch_size + b;
  const int64_t length = corpus_.size();
  if (options_.order == Order::kSequential) return number * options_.seq_len % (length - options_.seq_len - 1);
  const uint64_t draw = splitmix64(splitmix64(options_.seed) + static_cast<uint64_t>(number));
  return static_cast<int64_t>(draw % static_cast<uint64_t>(length - options_.seq_len));
}

std::string TokenBatches::name(int64_t first) const {
  std::string text = "text from bytes ";
  for (int64_t b = 0; b < options_.batch_size; ++b) text += cat(b == 0 ? "" : ", ", offset(first, b));
  return text;
}

int64_t TokenBatches::seq_len() const {
  const auto difficulty = options_.curriculum ? options_.curriculum->difficulty() : std::nullopt;
  return std::min(options_.seq_len, difficulty.value_or(options_.seq_len));
}

TokenBatch TokenBatches::get(int64_t first) {
  const int64_t time = options_.seq_len;
  TokenBatch batch{at::empty({options_.batch_size, time}, at::kLong),
                   at::empty({options_.batch_size, time}, at::kLong)};
  auto* data = batch.data.mutable_data_ptr<int64_t>();
  auto* target = batch.target.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < options_.batch_size; ++b) {
    const int64_t start = offset(first, b);
    corpus_.read(start, bytes_);
    for (int64_t i = 0; i <= time; ++i) {
      const int64_t token = bytes_[static_cast<size_t>(i)];
      require<ds::ConfigError>(token < options_.vocab, corpus_.path(), ": byte ", token, " at offset ", start + i,
                               " is no token of --vocab ", options_.vocab,
                               "; bytes are tokens: --vocab 256 takes all of them");
      if (i < time) data[b * time + i] = token;
      if (i > 0) target[b * time + i - 1] = token;
    }
  }
  if (options_.curriculum) {
    batch.data = options_.curriculum->truncate(batch.data, 1);
    batch.target = options_.curriculum->truncate(batch.target, 1);
  }
  return {batch.data.to(options_.device), batch.target.to(options_.device)};
}

}  // namespace gpt
