// What a model costs, layer by layer: by the formulas of a GPT, or by numbers of the user's own. Pure arithmetic,
// torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds::tool {

// Of one micro-batch.
struct LayerCost {
  std::string name;          // "h.3"
  std::string type;          // "gpt::Block", for pipeline.partition "type:REGEX"
  int64_t parameters = 0;    // of a rank, as all that follows
  double forward_flops = 0;  // of forward; the gradients of the input and of the weights take as many each
  double kept_bytes = 0;     // activations, from forward to backward
  double output_bytes = 0;   // what the next layer gets
  std::string tied;          // layers of one key share their parameters; empty: none
  // Along a tensor axis: all-reduces, each of so many bytes (or as much in reduce-scatters and all-gathers).
  double summed_bytes = 0;
  int forward_sums = 0;
  int backward_sums = 0;
};

// Ranks that share each layer.
struct TensorRanks {
  int64_t count = 1;
  bool sequence_parallel = false;  // between layers activations are cut along the sequence
};

// The model of examples/gpt as its pipeline has it: wte, wpe, blocks, ln_f, head.
struct GptShape {
  int64_t layers = 0;  // blocks
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t seq_len = 0;  // tokens of a sequence, all of its context
  int64_t vocab = 0;
  bool tied = false;             // the head has wte's weights
  bool flash_attention = false;  // scores are not kept, but computed again in backward
};

// A layer with P parameters takes 2 P operations a token, attention 4 x seq_len x hidden more (not halved for being
// causal: Narayanan et al., arXiv:2104.04473), the embeddings none. A block keeps what Korthikanti et al.
// (arXiv:2205.05198, section 4) count, 34 s b h + 5 a s^2 b bytes at 16 bits: elements and the masks of dropouts, one
// byte each, which a model without dropout does not have. The last layers keep their inputs, and scores in float32.
// `element_bytes`: of activations. Of layers that ranks share (`tensor`), each has its part of the weights, operations
// and scores; norms, residuals and the biases of outputs are whole, and what they keep, with sequence_parallel cut too
// (the same paper, section 4.2). Throws ConfigError for numbers below 1 or above those of flag_limits.h, and heads that
// do not divide hidden.
std::vector<LayerCost> gpt_layers(const GptShape& shape, int64_t micro_batch, int64_t element_bytes,
                                  const TensorRanks& tensor = {});

// A model that is known by its sums: equal layers, the first ones with a parameter more where these do not divide.
struct PlainModel {
  int64_t layers = 1;
  int64_t parameters = 0;
  double flops = 0;             // of forward, of a micro-batch
  double activation_bytes = 0;  // kept by all layers of a rank, of a micro-batch
  double output_bytes = 0;      // of each layer
};
// All of the parameters and operations are taken for split; a layer adds up its output twice, forward and backward.
// Throws ConfigError for layers and parameters below 1 or above those of flag_limits.h.
std::vector<LayerCost> equal_layers(const PlainModel& model, const TensorRanks& tensor = {});

// Tied parameters count once.
int64_t count_parameters(const std::vector<LayerCost>& layers);

}  // namespace ds::tool
