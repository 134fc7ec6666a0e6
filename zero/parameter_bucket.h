// A flat buffer that holds parameters of the model; the parameters become views of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/slices/slice_store.h"
#include "zero/gather_memory.h"
#include "zero/kept_slice.h"
#include "zero/parameter.h"
#include "zero/partition.h"

namespace ds::zero {

// A flat buffer and the parameters that are views of it: which memory they lie in, and what reads of them see. Padding
// holds zeros. Not thread safe.
//
// The memory of the buffer of a sharded bucket comes and goes: all views of it, those that autograd saved too, share
// one storage, so that they are full again as soon as the storage is. While the buffer has no memory, or its elements
// are on their way, the parameters lie in a storage without memory: whoever reads one unseen gets an error.
class BucketStorage {
 public:
  // Makes the parameters that `layout` names views of `flat`. Undefined: they stay where they are.
  BucketStorage(const BucketLayout& layout, const std::vector<Parameter>& parameters, at::Tensor flat);

  // The parameters, in the order of the layout's segments.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // The buffer, which has no memory while it is released.
  const at::Tensor& flat() const { return flat_; }

  // Frees the memory that the buffer was made with: from now on, allocate() and release() give and take its memory.
  void begin_released();
  // Takes memory for the buffer, with unspecified contents. Parameters see it, but for those that the program has given
  // other memory.
  void allocate(GatherMemory& memory);
  // Gives the memory back; the parameters lie in released_storage() then.
  void release(GatherMemory& memory);
  bool allocated() const { return flat_.storage().nbytes() > 0; }
  // The storage of the parameters while the buffer is released; null before begin_released().
  const at::Storage& released_storage() const { return released_; }

  // Begin and end an arrival at a bucket that is not sharded: while the slices of other ranks are on their way to the
  // buffer, its parameters lie in coming_storage(); show() for an operator that is to read a tensor there.
  void begin_arrival();
  void end_arrival();
  const at::Storage& coming_storage();
  // Makes an alias of a parameter see the memory of the buffer from now on, where it was made (Tensor::data()) while
  // that was released or on its way.
  void show(const at::Tensor& tensor) const;

  // Sets the error text for whoever reads a parameter of a released buffer; {} in it is the parameter's name.
  void tell_when_released(std::string text);
  // Makes reads of the parameters throw a c10::Error with `text` until the next allocate().
  void hide(const std::string& text);
  // Makes reads of the parameters, and of views of them, throw with `text` for good.
  void end(const std::string& text);

  // Whether the parameter at `position` lies where it was put, with the dtype that it had.
  bool is_here(size_t position) const;
  // The values of the parameter at `position`. Throws UsageError where they have another shape than its view.
  at::Tensor value_of(size_t position) const;
  // Points the parameter at `position` to the buffer again.
  void point_back(size_t position) const;
  // Does so after the buffer has taken over `values`, where it has memory.
  void take_back(size_t position, const at::Tensor& values) const;
  // Takes parameters back that the program has given other memory (torch::load, set_data): copies what they hold to the
  // buffer, which has memory, in its dtype, and points them there again. Throws as value_of() does.
  void take_values_back() const;
  // Takes such parameters back without their values: they hold what the buffer does. Returns one of them, or null.
  const Parameter* take_parameters_back() const;

 private:
  std::vector<Parameter> parameters_;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;  // views of flat_, one for each parameter
  at::Storage released_;           // the storage of the parameters while the buffer is released
  std::string released_text_;      // the error text of released_
  bool hidden_ = false;            // released_ has another text than its own
  at::Storage coming_;             // the storage of the parameters during an arrival
};

// Parameters that are reduced, updated and gathered together: their flat buffer ([layout.numel], the model's dtype and
// device) and, of a sharded bucket (stage 3), the slice that this rank keeps while the buffer is released. Not thread
// safe.
class ParameterBucket {
 public:
  // `values` are the float32 (or original dtype) values of the full bucket, as made by `flatten`; the bucket is
  // allocated in `dtype` on the parameters' device and the parameters are re-pointed into it.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, const at::Tensor& values,
                  at::ScalarType dtype);

  // Makes a bucket that is sharded from the start, and never was whole: it keeps `slice` itself, [layout.slice_numel],
  // as this rank's, in the dtype and on the device of the bucket.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, at::Tensor slice);

  // Makes a bucket for gradients alone: the parameters stay where they are, and flat() is undefined.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters);

  const BucketLayout& layout() const { return layout_; }
  // The parameters, in the order of layout().segments.
  const std::vector<Parameter>& parameters() const { return storage_.parameters(); }
  // The bucket in messages: "3 (h.2.attn.qkv.weight, 5 more)".
  std::string describe(size_t index) const;
  // The dtype and device of the parameters.
  at::TensorOptions options() const { return (flat().defined() ? flat() : parameters().front().tensor).options(); }

  // The buffer, which has no memory while a sharded bucket is released.
  const at::Tensor& flat() const { return storage_.flat(); }
  // The memory of the buffer and of the parameters in it.
  BucketStorage& storage() { return storage_; }
  const BucketStorage& storage() const { return storage_; }

  // Keeps a copy of slice `rank` in `store` (null: beside flat()) and releases the rest. `bits` 8: the copy is encoded,
  // and so loses precision.
  void shard(int rank, int bits = 0, const std::shared_ptr<SliceStore>& store = nullptr);
  bool sharded() const { return slice_.defined(); }
  // The slice that this rank keeps of a sharded bucket.
  const KeptSlice& kept_slice() const { return slice_; }
  // The slice that rank `rank` owns: a view of flat() or, for a sharded bucket, the one that is kept (`rank` is this
  // one then), which has memory inside of kept_slice().use(). Not for an encoded bucket.
  at::Tensor slice(int rank) const;
  // The tensor that this rank holds from step to step: its slice of a sharded bucket, encoded or not, else flat().
  const at::Tensor& kept() const { return sharded() ? slice_.tensor() : flat(); }
  // Copies what flat() of a sharded, allocated bucket holds to this rank's slice.
  void keep_changes(int rank);
  // Takes one parameter back that the program has given other memory, while flat() has memory or not, of a bucket that
  // is not encoded: its values go to what this rank keeps, and are returned. `rank` owns the slice of a sharded bucket.
  // Throws UsageError for another shape.
  at::Tensor take_value_back(size_t position, int rank);

  // Keeps a copy of part `rank` of `ranks` equal ones of a sharded, allocated bucket, until it is dropped.
  void keep_secondary(int rank, int ranks);
  void drop_secondary() { secondary_.reset(); }
  const at::Tensor& secondary() const { return secondary_; }
  int64_t secondary_bytes() const { return secondary_.defined() ? static_cast<int64_t>(secondary_.nbytes()) : 0; }
  // The bytes that this rank holds now, but for those of the secondary slice and of a slice in a given store.
  int64_t held_bytes() const { return static_cast<int64_t>(flat().storage().nbytes()) + slice_.held_bytes(); }

 private:
  at::Tensor part(int rank) const;  // the rank's part of flat()

  BucketLayout layout_;
  BucketStorage storage_;
  KeptSlice slice_;       // defined while the bucket is sharded
  at::Tensor secondary_;  // a copy of a sharded bucket for the ranks of a node
};

}  // namespace ds::zero
