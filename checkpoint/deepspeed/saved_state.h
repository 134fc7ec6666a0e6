// Counters and settings of a checkpoint of DeepSpeed.
#pragma once

#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/source/training_state.h"

namespace ds::checkpoint {

// micro_steps, which DeepSpeed does not write, follows from global_steps. `config` and `client_state` hold what is
// plain JSON; the latter are the keys that are none of DeepSpeed's own. Throws IoError for missing or wrong values and
// for an optimizer other than Adam and AdamW.
TrainingState saved_state(const SavedCheckpoint& saved);

}  // namespace ds::checkpoint
