// Batch sizes of elastic training: one global batch that many world sizes can share, after DeepSpeed 0.19.6
// (elasticity/elasticity.py, versions 0.1 and 0.2). Pure.
//
// Each micro-batch size, and their least common multiple, times the largest highly composite number that stays within
// max_train_batch_size is a candidate; the one with the most valid world sizes wins, and among equals the larger or the
// smaller. Version 0.2 counts in whole nodes, and runs a world size that is not among them too, with another batch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/config_runtime.h"

namespace ds::engine::config {

// With version 0.2, data-parallel ranks times model_parallel_size are GPUs. Throws ConfigError: what is wrong with the
// section, without the name of the file; or that `data_parallel_size` is not valid, with the nearest sizes that are.
ElasticBatch elastic_batch(const ElasticitySection& section, int64_t data_parallel_size);

// Sizes next to `size`: "4 or 6".
std::string nearest_sizes(const std::vector<int64_t>& valid, int64_t size);

}  // namespace ds::engine::config
