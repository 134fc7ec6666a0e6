#include "checkpoint/deepspeed/layout.h"

#include <optional>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

void lay_out_buffers(const SavedCheckpoint& saved, SavedLayout& layout) {
  const std::optional<PickleField> module = saved.module();
  if (!module) return;
  const PickleField names = saved.model().at("buffer_names");
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names.item(i).text();
    layout.tensors.define_whole(module->where(), buffer_path(name),
                                layout.tensors.add(saved.models[0], module->at(name).tensor()));
  }
}

}  // namespace

SavedLayout lay_out(const SavedCheckpoint& saved) {
  SavedLayout layout;
  lay_out_buffers(saved, layout);
  if (saved.stage == 0 && !saved.module()) return layout;
  if (saved.stage > 0) {
    lay_out_partitioned(saved, layout);
  } else {
    lay_out_whole(saved, layout);
  }
  return layout;
}

}  // namespace ds::checkpoint
