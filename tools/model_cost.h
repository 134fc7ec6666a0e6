// The cost of a model, layer by layer, from the formulas of a GPT or from numbers of the user; and its layers dealt to
// pipeline stages. Pure arithmetic, torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace ds::tool {

// The cost of a layer for one micro-batch.
struct LayerCost {
  std::string name;          // "h.3"
  std::string type;          // "gpt::Block", for pipeline.partition "type:REGEX"
  int64_t parameters = 0;    // on one rank, like everything below
  double forward_flops = 0;  // the gradients of the input and of the weights take as many each
  double kept_bytes = 0;     // activations, from forward to backward
  double output_bytes = 0;   // the output, which the next layer gets
  std::string tied;          // layers of one key share their parameters; empty: none
  // All-reduces along a tensor axis, each of so many bytes (or as much in reduce-scatters and all-gathers).
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
// `element_bytes`: size of one element of an activation. Each rank of the tensor axis (`tensor`) has a shard of the
// weights, operations and scores; norms, residuals and the biases of outputs are replicated, and the activations that
// they keep are cut only with sequence_parallel (the same paper, section 4.2). Throws ConfigError for numbers below 1
// or above those of flag_limits.h, and heads that do not divide hidden.
std::vector<LayerCost> gpt_layers(const GptShape& shape, int64_t micro_batch, int64_t element_bytes,
                                  const TensorRanks& tensor = {});

// A model of which only totals are known: layers are equal, the first ones have a parameter more where the number does
// not divide.
struct PlainModel {
  int64_t layers = 1;
  int64_t parameters = 0;
  double flops = 0;             // of forward, of a micro-batch
  double activation_bytes = 0;  // kept by all layers of a rank, of a micro-batch
  double output_bytes = 0;      // of each layer
};
// The layers of that model. All parameters and operations count as split over the tensor axis; a layer has one
// all-reduce of its output in forward and one in backward.
// Throws ConfigError for layers and parameters below 1 or above those of flag_limits.h.
std::vector<LayerCost> equal_layers(const PlainModel& model, const TensorRanks& tensor = {});

// The number of parameters of the model; tied parameters count once.
int64_t count_parameters(const std::vector<LayerCost>& layers);

// The layers of one pipeline stage, and the sums of their costs for one micro-batch.
struct StageLayout {
  int begin = 0;  // layers [begin, end)
  int end = 0;
  int rank = 0;  // rank of the pipeline
  int64_t parameters = 0;
  double forward_flops = 0;
  double kept_bytes = 0;        // activations, from forward to backward
  double recomputed_bytes = 0;  // of the largest region that is computed again
  double output_bytes = 0;
};

// Deals the layers to stages. `partition`: pipeline.partition; "profile" goes by forward_flops. Every `interval`
// layers, from a stage's first one, are computed again together in backward and keep their input alone; 0: none. Throws
// ConfigError for an unknown partition and for fewer layers than stages.
std::vector<StageLayout> cut_into_stages(const std::vector<LayerCost>& layers, const pipeline::Schedule& schedule,
                                         const std::string& partition, int64_t interval);

}  // namespace ds::tool
