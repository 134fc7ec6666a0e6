#include "tools/checkpoint/commands.h"

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "checkpoint/source/tensor_parts.h"
#include "core/check.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint::tool {
namespace {

// The damage that shows when everything is opened and read.
std::vector<Damage> read_all(const Location& location) {
  std::unique_ptr<Source> source;
  try {
    source = open(location.folder);
  } catch (const Error& error) {
    return {{.file = {}, .tensor = {}, .what = error.what()}};
  }
  std::vector<Damage> damages;
  for (const auto& [path, info] : source->tensors()) {
    try {
      for_each_part(*source, path, [](const at::Tensor&) {});
    } catch (const Error& error) {
      damages.push_back({.file = {}, .tensor = path, .what = error.what()});
    }
  }
  return damages;
}

}  // namespace

bool verify_and_print(const Location& location, std::ostream& out) {
  require<IoError>(location.format != Format::kUnknown, location.folder,
                   ": no checkpoint: neither dsengine's index.json, nor safetensors weights, nor DeepSpeed's "
                   "*_model_states.pt");
  const bool own = location.format == Format::kDsengine;
  if (!own) {
    out << location.folder << ": format " << name_of(location.format)
        << " has no checksums; only its structure is checked, and every tensor read\n";
  }
  const std::vector<Damage> damages = own ? verify(location.folder) : read_all(location);
  for (const Damage& damage : damages) {
    out << (damage.file.empty() ? "" : cat(damage.file, ": "))
        << (damage.tensor.empty() ? "" : cat("tensor \"", damage.tensor, "\": ")) << damage.what << '\n';
  }
  if (damages.empty()) {
    out << location.folder << (own ? ": whole\n" : ": readable\n");
  } else {
    out << location.folder << ": damaged, " << damages.size() << (damages.size() == 1 ? " place\n" : " places\n");
  }
  return damages.empty();
}

}  // namespace ds::checkpoint::tool
