// Row-wise tables: weights of embeddings whose gradients, updates and new weights are the rows that a step reads.
//
// Note [Row-wise tables]
// A table of millions of rows is read in few of them. torch::nn::Embedding and EmbeddingBag with sparse(true) give it a
// sparse gradient, and some optimizers leave alone what has none: Adagrad, SGD without momentum, SparseAdam. Such a
// table has a bucket of its own (BucketLayout::row_width), in slices of whole rows. Nothing in a step has its size, but
// for the moving average of the weights:
//   * zero/reduction/row_gradient.h keeps its gradient as rows with their numbers, and every rank gets those of all;
//   * the norm adds the squares of the rows that this rank updates (own_rows());
//   * RowOptimizer::update_rows() updates these rows of the slice and its states;
//   * ParameterAccess::updated_rows() sends them to the other ranks.
// At stage 3 no rank has the table: RowTables reads the rows that layers name from the ranks that own them, gradients
// go to these, and nothing is sent after an update. Nor is it whole while it gets its first values
// (StartValues::of_slice()).
// Slices, states and checkpoints are those of any bucket. engine/setup/row_wise_setup.h decides which tables are so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/slices/table_rows.h"
#include "layers/sharded_tables.h"
#include "model/state/model_layout.h"
#include "model/state/model_state.h"
#include "zero/gather/row_reads.h"

namespace ds::engine {

// Gives row-wise tables their widths, by parameter, and buckets of their own.
void lay_out_rows(const std::vector<int64_t>& widths, BucketOptions& options);

// The tables of a model whose rows are sharded: while it lives, their layers read rows.
class RowTables {
 public:
  // The model, whose gatherer is made, outlives it.
  explicit RowTables(const ModelState& model);
  RowTables(const RowTables&) = delete;
  RowTables& operator=(const RowTables&) = delete;
  // Returns a digest of the reads since the last call: equal on ranks that have met in the same ones.
  uint64_t take_digest() { return reads_.take_digest(); }

 private:
  zero::RowReads reads_;
  std::vector<std::shared_ptr<const layers::ReadRows>> tables_;
};

// Returns the rows of a row-wise bucket's reduced gradient that this rank updates, numbered from the first row of what
// it updates. They share memory with the gradient.
TableRows own_rows(const ModelState& state, size_t bucket);

// Returns the reduced gradient of what this rank updates of a bucket, flat: of a row-wise one a dense copy.
at::Tensor flat_gradient(const ModelState& state, size_t bucket);
// Takes over what was written to flat_gradient(), where that is a copy.
void keep_flat_gradient(const ModelState& state, size_t bucket, const at::Tensor& flat);

}  // namespace ds::engine
