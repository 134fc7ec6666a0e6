// The steps of config::parse() that have files of their own. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// The batch sizes that the file, or an "auto", gives.
struct GivenBatchSizes {
  std::optional<int64_t> train, micro, accumulation;
  bool left_auto = false;      // one of them is "auto" and nobody said what it is
  int64_t sequence_ranks = 1;  // ranks that share a batch and count once, for messages
};

struct BatchSizes {
  int64_t train = 0, micro = 0, accumulation = 0;
};

// Fills in what is missing of train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
// data-parallel size, by DeepSpeed's rules (batch_sizes.cc). Impossible numbers become errors that say where each
// number came from and which settings next to it fit.
BatchSizes resolve_batch_sizes(const GivenBatchSizes& given, int64_t dp_world_size, JsonProblems& problems);

// Turns the section `elasticity` into the batch sizes of a config (elastic_section.cc): sets config.elastic and the
// three batch sizes for config.dp_world_size, in place of those of the file; warns of what it replaces, and of a world
// size that changes the global batch. Mistakes of the section, and a world size that it does not allow, are errors.
//
// `scheduled`: the section as the scheduler of the job has seen it, JSON (the environment variable
// DEEPSPEED_ELASTICITY_CONFIG); null: unknown. max_train_batch_size, micro_batch_sizes and version have to agree.
void resolve_elastic_batch(DsConfig& config, const char* scheduled, JsonProblems& problems);

// Reads the file of actions that pipeline.schedule names into `own_schedule`, which becomes null for the name of a kind
// (ds_config.cc). To be called again where the program sets another schedule. Throws IoError and ConfigError.
void read_own_schedule(PipelineSection& section);

// Applies the rules that tie keys of different sections together (cross_checks.cc): errors for settings that exclude
// each other (both keys are named), warnings for settings without effect here.
void check_across_sections(const DsConfig& config, JsonProblems& problems);

// Says what to write in place of the key at a JSON pointer ("/learning_rate", "/zero_optimization/offload"), for keys
// that people write from habit: of other trainers, of torch's arguments, of their own programs (habitual_keys.cc). A
// ds_config has none of them, so that training would go on without what they say. "write ...", or where it belongs;
// empty: not known.
std::string meaning_of_key(const std::string& pointer);

// All such keys, as paths ("zero_optimization.offload") without '_' and '-' in the key, for tests.
std::vector<std::string> habitual_keys();

}  // namespace ds::engine::config
