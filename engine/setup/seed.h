// Seeds, deterministic mode and the precision of products, process-wide.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ds::engine {

// Seeds every generator LibTorch has (CPU and each CUDA device) with `seed` + `rank`: dropout then differs between
// ranks. What must agree between ranks does not depend on it: initial parameters are broadcast from rank 0, and the
// data loader shuffles by the seed itself (the key "seed" of the config) and the epoch.
void seed_everything(uint64_t seed, int rank = 0);

// True: LibTorch uses deterministic algorithms, and throws for an operation that has none (warn_only: warns); cuDNN
// stops choosing algorithms by timing. Two runs with the same seed, ranks, batches and thread counts then agree bit by
// bit.
void set_deterministic(bool deterministic, bool warn_only = false);

// Sets what scaled_dot_product_attention uses on a GPU: of these ("cudnn", "flash", "efficient", "math") the first that
// takes the inputs, and nothing else. `device`: LibTorch sets its own order at the first use of a CUDA device, so that
// this use is made before. Of no effect with a CPU, whose kernels LibTorch chooses by the same settings.
void set_sdpa_backends(const std::vector<std::string>& backends, c10::Device device);
// The settings alone, which the kernels of every device go by.
void order_sdpa_backends(const std::vector<std::string>& backends);

// Sets the precision of products of float32 matrices, and of convolutions by cuDNN: "highest", "high" or "medium".
void set_float32_matmul_precision(const std::string& precision);

}  // namespace ds::engine
