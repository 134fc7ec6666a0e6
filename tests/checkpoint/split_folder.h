// A checkpoint whose tensors were written in parts, as the ranks of a tensor axis do.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/save_job.h"
#include "checkpoint/source/training_state.h"
#include "checkpoint/tag_folder.h"
#include "core/split/part_runs.h"
#include "core/split/tensor_part.h"

namespace ds::checkpoint {

// How one tensor is written: by `count` ranks along the axis, times those that share a part.
struct SplitTensor {
  std::string path;
  at::Tensor values;
  Cut cut = {};
  int count = 0;  // 0: whole, by the first rank of the axis
};

inline at::Tensor part_values(const at::Tensor& whole, const TensorPart& part) {
  const at::Tensor result = at::empty(part.sizes(), whole.options());
  const at::Tensor flat = whole.contiguous();
  const size_t element = whole.element_size();
  part.for_each_run(0, part.numel(), [&](int64_t from, int64_t to, int64_t length) {
    std::memcpy(static_cast<char*>(result.mutable_data_ptr()) + to * element,
                static_cast<const char*>(flat.const_data_ptr()) + from * element, length * element);
  });
  return result;
}

// `sharing` ranks write equal shares of each part. Ranks are numbered as in an engine: those of the axis are
// neighbours.
inline void write_split_folder(const std::vector<SplitTensor>& tensors, const std::string& folder, int axis,
                               int sharing, const TrainingState& state = {},
                               const std::map<std::string, std::string>& aliases = {}) {
  const std::filesystem::path path(folder);
  SaveTarget target{.save = new_save(path.parent_path().string(), path.filename().string()), .ranks = axis * sharing};
  begin_tag(target.save);
  for (target.rank = target.ranks - 1; target.rank >= 0; --target.rank) {
    const int index = target.rank % axis;
    const int share = target.rank / axis;
    std::vector<PlannedPiece> pieces;
    std::vector<at::Tensor> values;
    for (const SplitTensor& tensor : tensors) {
      const int parts = tensor.count == 0 ? 1 : tensor.count;
      for (int part = index; part < parts; part += axis) {  // more parts than ranks: a rank has several
        PlannedPiece piece{.path = tensor.path,
                           .tensor = {.dtype = tensor.values.scalar_type(), .sizes = tensor.values.sizes().vec()}};
        at::Tensor own = tensor.values;
        if (tensor.count > 0) {
          piece.part = std::make_shared<TensorPart>(piece.tensor.sizes, tensor.cut, part, tensor.count);
          own = part_values(tensor.values, *piece.part);
        }
        piece.offset = own.numel() * share / sharing;
        piece.length = own.numel() * (share + 1) / sharing - piece.offset;
        if (piece.length == 0 && (tensor.values.numel() > 0 || share > 0 || part > 0)) continue;
        values.push_back(own.reshape({-1}).narrow(0, piece.offset, piece.length).contiguous());
        pieces.push_back(std::move(piece));
      }
    }
    SaveJob job(target);
    job.open(pieces);
    for (size_t i = 0; i < pieces.size(); ++i) job.write(i, values[i]);
    job.finish();
    if (target.rank == 0) job.publish(state, aliases, std::chrono::milliseconds(0));
  }
}

}  // namespace ds::checkpoint
