// compression_training: from the section as written to the rules that layers follow. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "dsengine/config.h"
#include "layers/compressed/methods.h"

namespace ds::engine::config {

// Returns the rules of a section that has been checked.
std::vector<model_compression::Rule> compression_rules(const CompressionTrainingSection& section);
// `add` hears of every mistake.
std::vector<model_compression::Rule> compression_rules(const CompressionTrainingSection& section,
                                                       const model_compression::AddProblem& add);

// What a ds_config says of compression, whatever else it says and leaves out. Throws ConfigError with every mistake of
// the section.
struct CompressionTraining {
  CompressionTrainingSection section;
  uint64_t seed = 0;
};
CompressionTraining read_compression_training(const ConfigSource& source);

}  // namespace ds::engine::config
