// gradient_compression: an own section. Field names and defaults are its keys and defaults.
#pragma once

#include <cstdint>

namespace ds::engine::config {

enum class CompressionMethod { kNone, kFloat16, kBFloat16, kInt8, kTopK, kPowerSgd, kSign };

const char* name_of(CompressionMethod method);

struct GradientCompressionSection {
  CompressionMethod method = CompressionMethod::kNone;
  double top_k = 0.01;              // top_k: share of the elements that are sent
  int64_t rank = 4;                 // power_sgd: columns of the factors
  int64_t start_step = 0;           // optimizer steps before it begins
  bool error_feedback = true;       // what is not sent is added to the next gradient
  bool between_nodes_only = false;  // inside a node gradients are added as they are

  // More than another dtype on the wire.
  bool compresses() const {
    return method != CompressionMethod::kNone && method != CompressionMethod::kFloat16 &&
           method != CompressionMethod::kBFloat16;
  }
};

}  // namespace ds::engine::config
