// The order in which Megatron-LM draws sequences of tokens from a collection of documents, number for number.
// Torch-free.
//
// The documents of all epochs are shuffled together and laid end to end. Sample k is the sequence_length + 1 tokens
// from token k * sequence_length on: neighbours share one token, the last label of one and the first input of the
// other. The samples are shuffled again. Where less than four fifths of the last epoch are needed, its documents and
// its samples are shuffled apart, behind those of the whole epochs, so that no document comes more often than it
// should.
//
// Both shuffles are those of numpy.random.RandomState(seed), one after the other. A position is a number, so a run is
// resumed without replaying anything. (Shoeybi et al., "Megatron-LM", 2019; megatron/core/datasets/gpt_dataset.py.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace ds::data {

// The shuffles of numpy.random.RandomState(seed).
class NumpyShuffle {
 public:
  explicit NumpyShuffle(uint32_t seed) : bits_(seed) {}

  template <class T>
  void shuffle(T* first, size_t count) {
    for (size_t i = count; i-- > 1;) std::swap(first[i], first[below_or_at(i)]);
  }

 private:
  // A uniform number from 0 to `most`: bits are drawn until they are not more than that.
  uint64_t below_or_at(uint64_t most);

  std::mt19937 bits_;
};

struct TokenOrderOptions {
  int64_t sequence_length = 0;  // inputs of a sample; > 0
  int64_t num_samples = 0;      // the samples that are needed; 0: those of one epoch
  uint32_t seed = 1234;
};

class TokenOrder {
 public:
  // `lengths` are the tokens of each document. Throws UsageError where they make no sample.
  TokenOrder(const std::vector<int32_t>& lengths, const TokenOrderOptions& options);

  // The number of samples, at least those that are needed.
  int64_t size() const { return static_cast<int64_t>(shuffled_.size()); }
  int64_t epochs() const { return epochs_; }

  // Some tokens of a document.
  struct Piece {
    int64_t document = 0;
    int64_t first = 0;  // of its tokens
    int64_t count = 0;
  };
  // The pieces of a sample, in order, sequence_length + 1 tokens in all. 0 <= index < size().
  std::vector<Piece> pieces(int64_t index) const;

 private:
  int64_t sequence_length_;
  int64_t epochs_ = 1;
  std::vector<int32_t> documents_;  // of all epochs
  std::vector<int64_t> begins_;     // of each of them among all tokens, and the end of the last one
  std::vector<int64_t> shuffled_;   // the samples, counted along the tokens
};

// Which of several datasets each sample of a blend is from, and its number there: Megatron-LM's blend, which takes the
// dataset that lags most behind its weight.
struct BlendOrder {
  std::vector<int32_t> datasets;
  std::vector<int64_t> samples;
};
// `weights` are positive; their sum counts as one. Throws UsageError for others.
BlendOrder blend_order(const std::vector<double>& weights, int64_t size);

}  // namespace ds::data
