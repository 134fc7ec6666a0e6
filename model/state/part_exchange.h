// How an optimizer that looks at whole tensors (Lamb, Muon) sees those of which each rank of a tensor axis has a part.
#pragma once

#include <memory>
#include <vector>

#include "model/state/tensor_parts.h"
#include "optim/shard_optimizer.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// Sums over `slices`, then over the axis. `parts` outlives the result.
std::shared_ptr<optimizers::SliceExchange> make_part_sums(std::shared_ptr<optimizers::SliceExchange> slices,
                                                          const TensorParts& parts);
// Of the engine's parameters. Both outlive the result.
std::shared_ptr<optimizers::PartExchange> make_part_exchange(const TensorParts& parts,
                                                             const std::vector<zero::Parameter>& parameters);

}  // namespace ds::engine
