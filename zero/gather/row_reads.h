// Reads of tables whose rows are sharded (stage 3): a layer gets the rows that it names, and nobody the table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "dsengine/comm.h"
#include "zero/gather/live_buckets.h"

namespace ds::zero {

// Reads rows of the sharded buckets that are row-wise tables (BucketLayout::row_width). Ranks read a table equally
// often, each its own rows, or none of them; where communicators compare labels, ranks that do not get an error that
// names both. Not thread safe.
class RowReads {
 public:
  // The error text of whoever reads such a table in another way; {} is its name.
  static constexpr const char* kReleased =
      "parameter {} is a table whose rows are sharded over the ranks (stage 3, sparse(true)): expected a read by its "
      "Embedding or EmbeddingBag layer, which gets the rows that it names from their owners, found something else that "
      "reads the weight. It is whole in a scope of engine->gathered_parameters({weight}); with sparse(false) all "
      "operators can read it, and each gathers the table";

  // Both outlive it. `ranks`: those that own slices.
  RowReads(const LiveBuckets& buckets, comm::Communicator& ranks) : buckets_(buckets), ranks_(ranks) {}

  // Returns the rows of a table, [k, width], from the ranks that own them. `rows`: [k] int64, ascending, each once.
  // Undefined where the table is full at the moment, or the program has given it other memory, on all ranks: it is to
  // be read there. Collective; throws CommError, and UsageError on all ranks where one of them names a row that the
  // table does not have.
  at::Tensor read(size_t bucket, const at::Tensor& rows);
  // Returns a digest of the reads since the last call, in their order, also among the gathers: equal on ranks that have
  // met in the same ones.
  uint64_t take_digest() { return std::exchange(digest_, 0); }

 private:
  const LiveBuckets& buckets_;
  comm::Communicator& ranks_;
  uint64_t digest_ = 0;
};

}  // namespace ds::zero
