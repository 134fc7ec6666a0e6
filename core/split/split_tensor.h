// Tensors of which each rank has a part: ordinary at::Tensors that show the sizes of the full tensor.
//
// A split tensor has no memory. It carries a dispatch key of its own, above autocast and autograd, the part, and how
// the full tensor is cut; folder parallel computes operators on it. Below the key there are plain tensors with plain
// autograd. Along an axis a tensor without the key is the same on all ranks, and so is its gradient, complete on each.
// The idea is that of torch's DTensor, one level higher.
//
// A split tensor's autograd edge leads to its part's and back (Note [Bridges] in split_tensor.cc), so that
// requires_grad() and autograd functions of a program are right. Functions here run no collective. A tensor is used
// from one thread at a time, as any other. Whoever asks for its memory (data_ptr(), accessors, torch::save()) gets a
// c10::Error that names the tensor and the call that gathers it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <memory>
#include <optional>
#include <string>

#include "core/split/tensor_part.h"

namespace ds {

// torchdistx' key; libtorch registers no kernel under it.
inline constexpr c10::DispatchKey kSplitKey = c10::DispatchKey::DeferredInit;

// The ranks of an axis, each of which has a part.
class SplitAxis {
 public:
  virtual ~SplitAxis() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The values of the full tensor of `split`, a split tensor of this axis: without history, in new memory. Collective.
  virtual at::Tensor joined_values(const at::Tensor& split) = 0;
};

// The placement of a tensor along an axis: cut into parts (a shard on each rank), or summed, or an addend (a partial
// sum on each rank). Without any of these it is for reading only, as a view of a gathered tensor is: a change of it
// would be lost.
struct Placement {
  std::shared_ptr<SplitAxis> axis;
  std::optional<Cut> cut;
  // Every rank has the full tensor (a replica) and a partial sum of its gradient, which is the sum of these over the
  // axis. Used by an operator on parts, the tensor gets the part of the gradient that comes of them; used by a plain
  // one, 1/T of the full gradient.
  bool summed = false;
  // The full tensor is the sum of what the ranks have: each has a partial sum, as of the gradient of a summed tensor.
  bool addend = false;
};

bool is_split(const at::Tensor& tensor);
// The placement of a split tensor, valid as long as that lives. Throws UsageError for another tensor.
const Placement& placement_of(const at::Tensor& split);
// The part of a split tensor, with its history: a plain tensor.
at::Tensor part_of(const at::Tensor& split);

// Makes a split tensor of `sizes` whose part here is `part`: plain, of the sizes that TensorPart says. It shares the
// part's memory and history. The placement's cut is normalized. Throws UsageError when the sizes do not fit.
at::Tensor make_split(at::Tensor part, Placement placement, c10::IntArrayRef sizes);
// This rank's part of a plain tensor, without history; a view of it where the part is one range, or all of it where
// there is no cut.
at::Tensor slice_of(const at::Tensor& whole, const Placement& placement);
at::Tensor slice_of(const at::Tensor& whole, const TensorPart& part);
// Copies rank `index`'s part between its place in `whole` and `part`.
void copy_part_into(const at::Tensor& whole, const at::Tensor& part, const Cut& cut, int index, int count);

// Makes `parameter`, which others hold too (members of a module), a split tensor in place, cut or summed: it keeps its
// identity and loses its memory. Returns the leaf, a plain tensor with this rank's part, which alone is trained; `part`
// becomes it. `name` is for messages.
at::Tensor split_parameter(const at::Tensor& parameter, const Placement& placement, const at::Tensor& part,
                           std::string name);
// The name and the leaf of a split parameter; empty and undefined for another split tensor.
std::string split_name(const at::Tensor& split);
at::Tensor leaf_of(const at::Tensor& split);
// Makes a split parameter show its leaf again, after that got another dtype or device (set_data); the history leads to
// the leaf's accumulator of gradients as it is now.
void follow_leaf(const at::Tensor& parameter);
// Makes the leaf of a split parameter require a gradient, or none, as set_requires_grad() of the parameter has said.
// Every operator that reads the parameter does so first.
void follow_flag(const at::Tensor& parameter);

// Whether the output that a layer computes with a split weight, or with its transpose, is to be gathered.
bool joins_output(const at::Tensor& tensor);
void mark_joins_output(const at::Tensor& split);

// Gives the split tensor its history, after an operator has changed `part`, which part_of() gave, in place.
void note_changed_part(const at::Tensor& split, const at::Tensor& part);

}  // namespace ds
