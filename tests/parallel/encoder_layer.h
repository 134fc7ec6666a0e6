// LibTorch's encoder layer, whose query, key and value are fused, and how it is split.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "dsengine/parallel.h"

namespace ds::parallel {

using EncoderLayer = torch::nn::TransformerEncoderLayerImpl;

// Of width 64 with 4 heads, without dropout.
inline std::shared_ptr<EncoderLayer> new_encoder_layer() {
  return std::make_shared<EncoderLayer>(
      torch::nn::TransformerEncoderLayerOptions(64, 4).dim_feedforward(128).dropout(0.0));
}

inline std::vector<SplitRule> rules_of_encoder_layer() {
  return {{.pattern = ".*in_proj_(weight|bias)", .style = Style::kColumn, .blocks = {64, 64, 64}},
          {.pattern = ".*out_proj", .style = Style::kRow},
          {.pattern = "linear1", .style = Style::kColumn},
          {.pattern = "linear2", .style = Style::kRow}};
}

}  // namespace ds::parallel
