#include "dsengine/token_dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "data/indexed_dataset.h"
#include "data/token_order.h"

namespace ds::data {
namespace {

// The tokens of each document that is used.
std::vector<int32_t> lengths_of(const efficiency::IndexedDataset& files, const TokenDatasetOptions& options) {
  const int64_t end = options.end_document == -1 ? files.rows() : options.end_document;
  require(options.first_document >= 0 && options.first_document < end && end <= files.rows(),
          "token dataset: ", files.path(), " has ", files.rows(),
          " documents, expected a part of these, found first_document = ", options.first_document,
          " and end_document = ", options.end_document);
  std::vector<int32_t> lengths;
  for (int64_t row = options.first_document; row < end; ++row) {
    lengths.push_back(static_cast<int32_t>(files.begin_of(row + 1) - files.begin_of(row)));
  }
  return lengths;
}

}  // namespace

struct TokenDataset::Parts {
  Parts(const std::string& path, const TokenDatasetOptions& asked)
      : options(asked),
        files(path),
        order(lengths_of(files, asked),
              {.sequence_length = asked.sequence_length, .num_samples = asked.num_samples, .seed = asked.seed}) {}

  TokenDatasetOptions options;
  efficiency::IndexedDataset files;
  TokenOrder order;
};

TokenDataset::TokenDataset(const std::string& path, const TokenDatasetOptions& options)
    : parts_(std::make_shared<const Parts>(path, options)) {}

size_t TokenDataset::size() const { return static_cast<size_t>(parts_->order.size()); }

int64_t TokenDataset::epochs() const { return parts_->order.epochs(); }

TokenSample TokenDataset::get(size_t index) const {
  const int64_t length = parts_->options.sequence_length;
  const at::Tensor text = at::empty({length + 1}, at::kLong);
  auto* to = text.mutable_data_ptr<int64_t>();
  for (const TokenOrder::Piece& piece : parts_->order.pieces(static_cast<int64_t>(index))) {
    const int64_t begin = parts_->files.begin_of(parts_->options.first_document + piece.document) + piece.first;
    for (int64_t i = 0; i < piece.count; ++i) *to++ = parts_->files.element(begin + i);
  }
  return {text.narrow(0, 0, length), text.narrow(0, 1, length)};
}

BlendedTokens::BlendedTokens(std::vector<TokenDataset> datasets, const std::vector<double>& weights, int64_t size)
    : datasets_(std::move(datasets)) {
  require(datasets_.size() == weights.size(), "blend: expected a weight for each of ", datasets_.size(),
          " datasets, found ", weights.size());
  BlendOrder order = blend_order(weights, size);
  from_ = std::move(order.datasets);
  samples_ = std::move(order.samples);
  for (size_t i = 0; i < datasets_.size(); ++i) {
    const auto share = std::count(from_.begin(), from_.end(), static_cast<int32_t>(i));
    require(static_cast<size_t>(share) <= datasets_[i].size(), "blend: dataset ", i, " has ", datasets_[i].size(),
            " samples, expected the ", share, " that are its share of ", size,
            "; give it a larger num_samples, Megatron-LM's ceil(ceil(weight * size) * 1.005)");
  }
}

TokenSample BlendedTokens::get(size_t index) const {
  require(index < size(), "blend: expected a sample below ", size(), ", found ", index);
  return datasets_[dataset_of(index)].get(static_cast<size_t>(samples_[index]));
}

}  // namespace ds::data
