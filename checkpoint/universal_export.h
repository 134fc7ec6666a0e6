// A checkpoint in DeepSpeed's universal layout, so that a program in Python goes on from it with any number of ranks
// and ZeRO stage 1, 2 or 3 ("checkpoint": {"load_universal": true} in its ds_config).
//
//   <save_dir>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    whole tensors, float32
//   <save_dir>/<tag>/zero/optimizer_state.pt                               settings of the groups, step
//   <save_dir>/<tag>/mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt   counters, client_state
//   <save_dir>/latest_universal
//
// After DeepSpeed 0.19.8: checkpoint/universal_checkpoint.py, runtime/base_optimizer.py, runtime/zero/stage3.py.
#pragma once

#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// `folder`: <save_dir>/<tag>. Appears complete or not at all; a tensor at a time is in memory. Adam and AdamW only:
// throws UsageError for a source without optimizer or with one that keeps other states. Throws IoError.
//
// What DeepSpeed does not take from this layout, the program has to provide: frozen weights and buffers (written to the
// model states all the same, under "module"), the loss scale of float16, and, at stage 3, settings of groups other than
// the first.
void export_universal(Source& source, const std::string& folder);

}  // namespace ds::checkpoint
