#include "pipeline/split_activations.h"

#include "core/check.h"

namespace ds::pipeline {

TensorSplits take_parts(Tensors& tensors, const SplitAxis* axis, const Printable& place) {
  TensorSplits splits(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_split(tensors[i])) continue;
    const Placement placement = placement_of(tensors[i]);
    const bool same =
        axis != nullptr && placement.axis->rank() == axis->rank() && placement.axis->size() == axis->size();
    require(same, place, ": output ", i, ": expected a plain tensor, or one that is split over the tensor axis of the ",
            "engine (", axis ? axis->size() : 1, " ranks), found one that is split over ", placement.axis->size(),
            " ranks; give the layers to initialize() as they are, with tensor_parallel.autotp_size, or return ",
            "ds::parallel::whole(output)");
    require(!placement.addend, place, ": output ", i, " is a partial sum on each rank of the tensor axis, as the ",
            "gradient of a replicated parameter is; return ds::parallel::whole(output)");
    if (placement.cut || placement.summed) splits[i] = {.sizes = tensors[i].sizes().vec(), .cut = placement.cut};
    tensors[i] = part_of(tensors[i]);
  }
  return splits;
}

Tensors with_full_sizes(const Tensors& parts, const TensorSplits& splits, const std::shared_ptr<SplitAxis>& axis) {
  Tensors tensors = parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!splits.at(i)) continue;
    const TensorSplit& split = *splits[i];
    tensors[i] = make_split(parts[i], {.axis = axis, .cut = split.cut, .summed = !split.cut}, split.sizes);
  }
  return tensors;
}

void gather_values(Tensors& tensors) {
  for (at::Tensor& tensor : tensors) {
    if (is_split(tensor)) tensor = placement_of(tensor).axis->joined_values(tensor);
  }
}

}  // namespace ds::pipeline
