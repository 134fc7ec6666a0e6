// Seeds, deterministic mode and the precision of products, process-wide.
#pragma once

#include <cstdint>
#include <string>

namespace ds::engine {

// Seeds every generator LibTorch has (CPU and each CUDA device) with `seed` + `rank`: dropout then differs between
// ranks. What must agree between ranks does not depend on it: initial parameters are broadcast from rank 0, and the
// data loader shuffles by the seed itself (the key "seed" of the config) and the epoch.
void seed_everything(uint64_t seed, int rank = 0);

// True: LibTorch uses deterministic algorithms, and throws for an operation that has none (warn_only: warns); cuDNN
// stops choosing algorithms by timing. Two runs with the same seed, ranks, batches and thread counts then agree bit by
// bit.
void set_deterministic(bool deterministic, bool warn_only = false);

// "highest", "high" or "medium": of products of float32 matrices, and of convolutions by cuDNN.
void set_float32_matmul_precision(const std::string& precision);

}  // namespace ds::engine
