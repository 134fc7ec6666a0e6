// Reduces what several ranks contributed, on this rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "core/text.h"
#include "dsengine/comm.h"

namespace ds::comm {

// destination[i] = op over r of sources[r][i], in the order of `sources` (rank order, so every rank that reduces the
// same contributions gets the same bits). bfloat16 and float16 are accumulated in float32 and rounded once; kAvg is the
// sum divided by the number of sources (integers: towards zero); min and max propagate NaN; integers wrap. destination
// may be one of the sources, and must not overlap them otherwise.
void local_reduce(void* destination, const std::vector<const void*>& sources, int64_t count, at::ScalarType dtype,
                  ReduceOp op);

// Throws UsageError naming `what` when the operation is not defined on the data type: kBand, kBor and kBxor on floating
// point, kSum, kAvg, kProduct and kBxor on bool, anything on types that communicators do not carry.
void require_reducible(at::ScalarType dtype, ReduceOp op, const Printable& what);

}  // namespace ds::comm
