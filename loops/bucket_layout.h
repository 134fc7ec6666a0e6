// How the gradients of a module that stays as it is are laid into buckets: torch's DistributedDataParallel's rules.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/parameter_bucket.h"

namespace ds::loops {

struct BucketCaps {
  int64_t first_bytes = 0;  // of the bucket that is reduced first
  int64_t bytes = 0;        // of the others
};

// Of parameters of one device and dtype together, cut at module boundaries. Buckets come in the order of their first
// parameters and are reduced from the last to the first: the last parameters of the model, whose gradients come first,
// have the small one. A parameter larger than its cap has a bucket of its own. `ranks`: that share them.
std::vector<zero::BucketLayout> lay_out_gradients(const std::vector<zero::Parameter>& parameters,
                                                  const BucketCaps& caps, int ranks);

}  // namespace ds::loops
