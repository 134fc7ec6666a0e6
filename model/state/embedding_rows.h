// sparse_gradients: which parameters are tables of embeddings, and what exchanges their rows alone.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/exchange_groups.h"
#include "model/state/model_layout.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// Of each trainable parameter the width of its rows, where it is the weight of a torch::nn::Embedding or EmbeddingBag
// of the module, or of a layer that is named as one (is_word_embedding()); else 0. Wrong guesses cost a count of rows.
std::vector<int64_t> table_widths(const torch::nn::Module& module, const std::vector<zero::Parameter>& parameters);

// Parts for BucketOptions: tables of one width share buckets with no other parameter.
std::vector<int> parts_by_width(const std::vector<int64_t>& widths);

// Takes the buckets of tables. Null where there are none.
std::unique_ptr<comm::BucketReduction> make_row_reduction(const compression::ExchangeGroups& groups,
                                                          const std::vector<zero::ParameterBucket>& buckets,
                                                          const std::vector<int64_t>& widths);

}  // namespace ds::engine
