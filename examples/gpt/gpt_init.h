// The weights a GPT starts with: computed from a seed, element by element, so that every program that follows the
// formula gets every bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt_model.h"

namespace gpt {

// Sets biases to 0 and LayerNorm weights to 1; other weights are uniform with standard deviation 0.02, for the two proj
// weights of each block 0.02 / sqrt(2 layers). Element j (row-major) of parameter number i (module order):
//   u = splitmix64(seed * 2^48 + i * 2^32 + j) >> 40,  w = (float(2u - 2^24) * 2^-24) * float(sqrt(3) * std)
void initialize_weights(Gpt& model, uint64_t seed);
// Initializes one part of the model, whose parameters bear `name` and a dot before their names.
void initialize_part(torch::nn::Module& part, const std::string& name, const GptConfig& config, uint64_t seed);
// The names of the parameters of the whole model, in module order.
std::vector<std::string> parameter_names(const GptConfig& config);

// Fills all parameters from a safetensors file. Throws ds::IoError naming what is missing, too much, or of another
// shape.
void load_weights(Gpt& model, const std::string& path);

int64_t parameter_count(const GptConfig& config);

}  // namespace gpt
