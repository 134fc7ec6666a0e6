#include "core/listed.h"
#include "dsengine/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "checkpoint/deepspeed/deepspeed_source.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/format.h"
#include "checkpoint/index.h"
#include "checkpoint/tag_folder.h"
#include "checkpoint/torch_weights.h"
#include "checkpoint/weight_files.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostNames = 10;  // in a message

// Sorted names.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// Where a save_dir was given in place of one of its tags: which to name. Empty when it is none.
std::string advice_on_tags(const fs::path& folder) {
  std::vector<std::string> tags;
  for (const std::string& name : names_in(folder)) {
    if (fs::is_directory(folder / name) && !name.starts_with(".") &&
        format_of((folder / name).string()) != Format::kUnknown) {
      tags.push_back(name);
    }
  }
  std::string latest;
  try {
    latest = read_latest(folder.string()).value_or("");
  } catch (const IoError&) {  // no help to anybody
  }
  if (tags.empty() && latest.empty()) return {};
  if (latest.empty()) return cat(": a folder of checkpoints; name one of its tags: ", listed(tags, kMostNames));
  return cat(": a folder of checkpoints; name one of its tags, the latest is ", (folder / latest).string(),
             tags.empty() ? ", which holds none" : cat(" of ", listed(tags, kMostNames)));
}

}  // namespace

std::unique_ptr<Source> open(const std::string& folder) {
  const fs::path path = folder;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require<IoError>(fs::exists(status), folder, ": no such file or folder");
  if (!fs::is_directory(status)) {
    require<IoError>(path.extension() == ".safetensors" || is_torch_file(folder), folder,
                     ": expected the folder of a checkpoint, a .safetensors file, or a .pt file of torch.save");
    return open_weights(folder);
  }
  switch (format_of(folder)) {
    case Format::kDsengine:
      return open_folder(folder);
    case Format::kDeepSpeed:
      return open_deepspeed(folder);
    case Format::kHuggingFace:
      return open_weights(folder);
    case Format::kTorch:
    case Format::kUnknown:
      break;
  }
  if (const std::string advice = advice_on_tags(path); !advice.empty()) throw IoError(cat(folder, advice));
  const std::vector<std::string> names = names_in(path);
  throw IoError(cat(folder, ": no checkpoint; looked for ", kIndexName, " (dsengine), *_model_states.pt (DeepSpeed), ",
                    kWeightFile, " and ", kWeightIndex, " (Hugging Face), found ",
                    names.empty() ? "nothing" : listed(names, kMostNames)));
}

}  // namespace ds::checkpoint
