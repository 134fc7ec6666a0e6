// Sequences of tokens from Megatron-LM's files, PATH.bin and PATH.idx, in the order in which Megatron-LM draws them.
//
//   ds::data::TokenDataset tokens("corpus_text_document", {.sequence_length = 1024, .num_samples = 100000});
//   ds::data::Loader loader(tokens, {.batch_size = 8, .rank = rank, .world_size = ranks, .shuffle = false});
//
// The documents of all epochs are shuffled and laid end to end, cut into sequences, and these are shuffled: by the
// seed, number for number as megatron/core/datasets/gpt_dataset.py does it. So a loader needs no shuffle, and its
// position is one in this order. Files are mapped and read where they are touched.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace ds::data {

// One sequence. int64 [sequence_length] each; labels are the tokens that follow.
struct TokenSample {
  at::Tensor tokens, labels;
  static constexpr auto fields() { return std::tuple(&TokenSample::tokens, &TokenSample::labels); }
};

struct TokenDatasetOptions {
  int64_t sequence_length = 0;  // > 0
  int64_t num_samples = 0;      // the samples that are needed, from as many epochs as that takes; 0: one epoch
  uint32_t seed = 1234;         // Megatron-LM's --seed
  // The documents that are used, for a split into training and validation: from `first_document` on, up to
  // `end_document`, which is not among them. -1: all of the rest.
  int64_t first_document = 0;
  int64_t end_document = -1;
};

// Sequences of one collection of documents. Copies share the files and the order. Any thread may read. Memory: 12 bytes
// for each document of each epoch, and 8 for each sample.
class TokenDataset {
 public:
  // `path` without .bin and .idx. Throws IoError for the files, UsageError for options out of range and for documents
  // that make no sample.
  TokenDataset(const std::string& path, const TokenDatasetOptions& options);

  TokenSample get(size_t index) const;
  // The number of samples, at least num_samples.
  size_t size() const;
  // The epochs that these samples are from.
  int64_t epochs() const;

 private:
  struct Parts;
  std::shared_ptr<const Parts> parts_;
};

// A blend of such datasets by weight, in Megatron-LM's order: each sample is of the dataset that lags most behind its
// weight. Megatron-LM gives a dataset num_samples = ceil(ceil(weight * size) * 1.005).
class BlendedTokens {
 public:
  // `weights` are positive, one for each dataset; their sum counts as one. Throws UsageError for others, and where a
  // dataset has less samples than its share of `size`.
  BlendedTokens(std::vector<TokenDataset> datasets, const std::vector<double>& weights, int64_t size);

  TokenSample get(size_t index) const;
  size_t size() const { return from_.size(); }
  // The number of the dataset that a sample is of.
  size_t dataset_of(size_t index) const { return static_cast<size_t>(from_.at(index)); }

 private:
  std::vector<TokenDataset> datasets_;
  std::vector<int32_t> from_;     // of each sample: its dataset
  std::vector<int64_t> samples_;  // and its number there
};

}  // namespace ds::data
