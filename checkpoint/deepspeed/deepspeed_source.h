// Reads a checkpoint that DeepSpeed's save_checkpoint wrote, of ZeRO stages 0 to 3, without Python.
#pragma once

#include <memory>
#include <string>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// `folder`: one tag (<save_dir>/<tag>). Written by Adam or AdamW, by any number of data-parallel ranks, stages
// of a pipeline and model-parallel ranks (joined_layout.h); no experts. Files are mapped, so only what is read is
// loaded. Paths:
//
//   weights/<name>               float32 masters of what was trained; frozen ones as the module had them
//   buffers/<name>
//   optimizer/exp_avg/<name>     and exp_avg_sq; with amsgrad max_exp_avg_sq; none of parameters never updated
//
// Throws IoError naming the file and what was expected of it.
std::unique_ptr<Source> open_deepspeed(const std::string& folder);

}  // namespace ds::checkpoint
