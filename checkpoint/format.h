// Whose checkpoint a path holds, told by names of files alone.
#pragma once

#include <cstdint>
#include <string>

namespace ds::checkpoint {

enum class Format : uint8_t {
  kDsengine,     // index.json; or files of its ranks without one, which a job left that died
  kDeepSpeed,    // *_model_states.pt and *_optim_states.pt
  kHuggingFace,  // safetensors weights: a folder of them, or one file
  kTorch,        // one file of torch.save
  kUnknown,
};

// "dsengine", "deepspeed", "huggingface", "torch", "unknown".
const char* name_of(Format format);

// `path`: one tag, a folder of weights, or a file. A folder with files of several is of the first one in the order
// above. kUnknown: also when there is no such path. Throws IoError for a folder that cannot be listed.
Format format_of(const std::string& path);

}  // namespace ds::checkpoint
