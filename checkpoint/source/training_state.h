// The state of a run that a checkpoint keeps beside tensors: counters, optimizer settings, schedules, where the data
// stood.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/curriculum_position.h"
#include "dsengine/lr_schedule.h"
#include "optim/loss_scaler.h"

namespace ds::checkpoint {

struct OptimizerState {
  std::string type;                              // ShardOptimizer::name()
  int64_t step_count = 0;                        // updates applied; bias correction uses it
  std::vector<optimizers::GroupOptions> groups;  // the groups at the save
};

// The position of a sampler (data/batch_sampler.h), counted over all ranks.
struct DataPosition {
  int64_t epoch = 0;
  int64_t next_sample = 0;
  uint64_t seed = 0;
  std::optional<efficiency::CurriculumPosition> curriculum = {};

  bool operator==(const DataPosition&) const = default;
};

struct TrainingState {
  int64_t global_steps = 0;
  int64_t global_samples = 0;
  int64_t micro_steps = 0;
  int64_t skipped_steps = 0;
  int world_size = 1;       // number of ranks that wrote it
  int pipeline_stages = 1;  // ranks that make up one pipeline; a divisor of world_size
  int tensor_ranks = 1;     // ranks of which each has a part of the split parameters; a divisor too
  int64_t zero_stage = 0;
  std::string precision;  // dtype of the model's parameters: "float32", "bfloat16", "float16", "float64"
  std::optional<OptimizerState> optimizer;  // none: weights only
  std::optional<optimizers::LossScalerState> loss_scaler;
  std::optional<int64_t> lr_iteration;              // LrScheduler::last_batch_iteration()
  std::optional<optimizers::PlateauState> plateau;  // LrScheduler::plateau()
  std::optional<DataPosition> data;
  std::optional<int64_t> ema_updates;  // updates that the moving average of the weights has had; none: there is none
  // The run that saved it, a number of 16 digits that runs which go on from one of its checkpoints take over; empty: a
  // writer without runs.
  std::string run;
  // The tag under which keep_last counts it, and may remove it; empty: it was saved without keep_last. A copy of the
  // folder under another name is not counted.
  std::string keep_last_tag;
  // The modules of the model that have no tensors in them (activations, dropout), by name, which LibTorch wants in a
  // file of a module; none: the writer did not say.
  std::optional<std::vector<std::string>> empty_modules;
  nlohmann::json config = nlohmann::json::object();        // the ds_config as it was given
  nlohmann::json client_state = nlohmann::json::object();  // the program's own values
};

nlohmann::json to_json(const TrainingState& state);
// Throws IoError that begins with `where` and names the key: missing, or of another type.
TrainingState training_state_from(const nlohmann::json& json, const std::string& where);

}  // namespace ds::checkpoint
