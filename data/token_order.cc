#include "data/token_order.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "core/check.h"

namespace ds::data {
namespace {

// How many epochs have the tokens of all samples.
int64_t epochs_of(int64_t tokens_of_epoch, const TokenOrderOptions& options) {
  if (options.num_samples == 0) return 1;
  const int64_t wanted = options.num_samples * options.sequence_length + 1;
  return std::max<int64_t>(1, (wanted + tokens_of_epoch - 1) / tokens_of_epoch);
}

// Whether so little of the last epoch is needed that it is shuffled apart.
bool is_last_apart(int64_t needed, int64_t samples_of_epoch) {
  constexpr double kThreshold = 0.8;
  return needed < static_cast<int64_t>(kThreshold * static_cast<double>(samples_of_epoch));
}

}  // namespace

uint64_t NumpyShuffle::below_or_at(uint64_t most) {
  const uint64_t mask = std::numeric_limits<uint64_t>::max() >> std::countl_zero(most);
  const bool is_short = most <= std::numeric_limits<uint32_t>::max();
  for (;;) {
    uint64_t value = bits_();
    if (!is_short) value = value << 32 | bits_();
    if ((value & mask) <= most) return value & mask;
  }
}

TokenOrder::TokenOrder(const std::vector<int32_t>& lengths, const TokenOrderOptions& options)
    : sequence_length_(options.sequence_length) {
  require(options.sequence_length > 0, "token order: expected a sequence_length from 1 up, found ",
          options.sequence_length);
  require(options.num_samples >= 0, "token order: expected num_samples from 0 (an epoch) up, found ",
          options.num_samples);
  require(lengths.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()),
          "token order: expected less than 2^31 documents, found ", lengths.size());
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  require(tokens > 1, "token order: expected documents with two tokens at least, found ", tokens, " in ",
          lengths.size(), " documents");
  epochs_ = epochs_of(tokens, options);
  const auto samples_in = [&](int64_t epochs) { return (epochs * tokens - 1) / sequence_length_; };
  const int64_t whole = samples_in(epochs_ - 1);  // of all epochs but the last
  const bool is_apart = epochs_ > 1 && is_last_apart(options.num_samples - whole, samples_in(1));
  const int64_t samples = samples_in(epochs_);
  require(samples > 0, "token order: ", tokens, " tokens are less than a sample of ", sequence_length_,
          " and one more; use more documents, a shorter sequence_length, or num_samples for several epochs");

  NumpyShuffle random(options.seed);
  const size_t count = lengths.size();
  for (int64_t epoch = 0; epoch < epochs_; ++epoch) {
    for (size_t i = 0; i < count; ++i) documents_.push_back(static_cast<int32_t>(i));
  }
  const size_t together = documents_.size() - (is_apart ? count : 0);
  random.shuffle(documents_.data(), together);
  random.shuffle(documents_.data() + together, documents_.size() - together);
  begins_.push_back(0);
  for (const int32_t document : documents_) begins_.push_back(begins_.back() + lengths[static_cast<size_t>(document)]);

  shuffled_.resize(static_cast<size_t>(samples));
  std::iota(shuffled_.begin(), shuffled_.end(), int64_t{0});
  const auto first = static_cast<size_t>(is_apart ? whole : samples);
  random.shuffle(shuffled_.data(), first);
  random.shuffle(shuffled_.data() + first, shuffled_.size() - first);
}

std::vector<TokenOrder::Piece> TokenOrder::pieces(int64_t index) const {
  require(index >= 0 && index < size(), "token order: expected a sample below ", size(), ", found ", index);
  int64_t at = shuffled_[static_cast<size_t>(index)] * sequence_length_;
  const int64_t end = at + sequence_length_ + 1;
  auto place = static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), at) - begins_.begin()) - 1;
  std::vector<Piece> result;
  for (; at < end; ++place) {
    const int64_t until = std::min(end, begins_[place + 1]);
    if (until > at)
      result.push_back({.document = documents_[place], .first = at - begins_[place], .count = until - at});
    at = until;
  }
  return result;
}

BlendOrder blend_order(const std::vector<double>& weights, int64_t size) {
  require(!weights.empty() && size >= 0, "blend: expected a weight for each dataset and a size from 0 up, found ",
          weights.size(), " weights and size ", size);
  for (const double weight : weights) {
    require(weight > 0 && weight <= std::numeric_limits<double>::max(), "blend: expected positive weights, found ",
            weight);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> taken(weights.size(), 0);
  BlendOrder order;
  for (int64_t sample = 0; sample < size; ++sample) {
    const double drawn = std::max(static_cast<double>(sample), 1.0);
    size_t last = 0;
    double most = std::numeric_limits<double>::lowest();
    for (size_t i = 0; i < weights.size(); ++i) {
      const double lag = weights[i] / sum * drawn - static_cast<double>(taken[i]);
      if (lag > most) {
        most = lag;
        last = i;
      }
    }
    order.datasets.push_back(static_cast<int32_t>(last));
    order.samples.push_back(taken[last]++);
  }
  return order;
}

}  // namespace ds::data
