// A flat buffer that holds parameters of the model; the parameters become views of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/slices/slice_store.h"
#include "core/split/tensor_part.h"
#include "zero/gather_memory.h"
#include "zero/partition.h"

namespace ds::zero {

// A parameter of the model. `tensor` shares its identity with the module's (set_data changes both). For a parameter
// that is split over a tensor axis, `tensor` is the leaf, which has this rank's part alone.
struct Parameter {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const TensorPart> part = nullptr;  // which part of the parameter `tensor` is; null: all of it

  // The sizes of the full parameter.
  std::vector<int64_t> whole_sizes() const { return part ? part->whole_sizes() : tensor.sizes().vec(); }
};

// A flat buffer and the parameters in it. Owns `flat` ([layout.numel], the model's dtype and device). Padding holds
// zeros. Not thread safe.
//
// A sharded bucket (stage 3) owns its rank's slice, as it is or encoded (core/numbers/block_codec.h), and the memory of
// `flat` comes and goes: all views of it, those that autograd saved too, share one storage, so that they are full
// again as soon as the storage is.
class ParameterBucket {
 public:
  // `values` are the float32 (or original dtype) values of the full bucket, as made by `flatten`; the bucket is
  // allocated in `dtype` on the parameters' device and the parameters are re-pointed into it.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, const at::Tensor& values,
                  at::ScalarType dtype);

  // Makes a bucket for gradients alone: the parameters stay where they are, and flat() is undefined.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters);

  const BucketLayout& layout() const { return layout_; }
  // The parameters, in the order of layout().segments.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // The bucket in messages: "3 (h.2.attn.qkv.weight, 5 more)".
  std::string describe(size_t index) const;
  // The dtype and device of the parameters.
  at::TensorOptions options() const { return (flat_.defined() ? flat_ : parameters_.front().tensor).options(); }
  // The buffer, which has no memory while a sharded bucket is released.
  const at::Tensor& flat() const { return flat_; }
  // The slice that rank `rank` owns: a view of flat() or, for a sharded bucket, what it keeps (`rank` is this one
  // then). Not for an encoded bucket.
  at::Tensor slice(int rank) const;

  // Keeps a copy of slice `rank` in `store` (null: beside flat()) and releases the rest. `bits` 8: the copy is encoded,
  // and so loses precision.
  void shard(int rank, int bits = 0, std::shared_ptr<SliceStore> store = nullptr);
  // Calls `use` while slice() and encoded_slice() of a sharded bucket have memory. `changes`: what it writes is kept.
  void use_slice(bool changes, const std::function<void()>& use) const;
  // Called around a gather. Returns the slice of `rank`, this one, encoded or not, to be read alone; see
  // core/slices/slice_store.h.
  at::Tensor begin_gather(int rank) const {
    if (store_) return store_->begin_gather(own_);
    return sharded() ? own_ : slice(rank);
  }
  void end_gather() const {
    if (store_) store_->end_gather(own_);
  }
  void prefetch_slice() const;
  bool slice_has_room() const { return !store_ || store_->has_room(); }
  // The bits of an encoded slice, else 0; and the slice.
  int bits() const { return bits_; }
  const at::Tensor& encoded_slice() const { return own_; }
  // The tensor that this rank holds from step to step: its slice of a sharded bucket, encoded or not, else flat().
  const at::Tensor& kept() const { return sharded() ? own_ : flat_; }
  bool sharded() const { return own_.defined(); }
  // Take memory for flat() of a sharded bucket, with unspecified contents, and give it back. While it has none the
  // parameters, but for those that the program has given other memory, lie in released_storage(): whoever reads one
  // unseen gets an error.
  void allocate(GatherMemory& memory);
  void release(GatherMemory& memory);
  const at::Storage& released_storage() const { return released_; }
  // Makes an alias of a parameter see the memory of the bucket from now on, where it was made (Tensor::data()) while
  // that was released or on its way.
  void show(const at::Tensor& tensor) const;
  // Begin and end an arrival at a bucket that is not sharded: while the slices of other ranks are on their way to
  // flat(), its parameters lie in coming_storage(), and whoever reads one unseen gets an error; show() for an operator
  // that is to read a tensor there.
  void begin_arrival();
  void end_arrival();
  const at::Storage& coming_storage();
  // Sets the error text for whoever reads a parameter of a released bucket; {} in it is the parameter's name.
  void tell_when_released(std::string text);
  // Makes reads of the parameters throw a c10::Error with `text` until the next allocate().
  void hide(const std::string& text);
  // Makes reads of the parameters, and of views of them, throw with `text` for good.
  void end(const std::string& text);
  bool allocated() const { return flat_.storage().nbytes() > 0; }
  // Takes parameters back that the program has given other memory (torch::load, set_data): copies what they hold to
  // flat(), which has memory, in its dtype, and points them there again. Throws UsageError for another shape.
  void take_values_back() const;
  // Takes such parameters back without their values: they hold what flat() does. Returns one of them, or null.
  const Parameter* take_parameters_back() const;
  // Takes one parameter back, with memory or without, of a bucket that is not encoded: its values go to what this rank
  // keeps, and are returned. `rank` owns the slice of a sharded bucket.
  at::Tensor take_value_back(size_t position, int rank);
  // Whether the parameter at `position` lies where it was put, with the dtype that it had.
  bool is_here(size_t position) const;
  // Copies what flat() of a sharded, allocated bucket holds to this rank's slice.
  void keep_changes(int rank);
  // Keeps a copy of part `rank` of `ranks` equal ones of a sharded, allocated bucket, until it is dropped.
  void keep_secondary(int rank, int ranks);
  void drop_secondary() { secondary_.reset(); }
  const at::Tensor& secondary() const { return secondary_; }
  // The bytes that this rank holds now, but for those of the secondary slice and of a slice in a given store.
  int64_t held_bytes() const;
  // The bytes of a slice in a given store.
  int64_t stored_bytes() const { return in_store_ ? static_cast<int64_t>(own_.nbytes()) : 0; }
  int64_t secondary_bytes() const { return secondary_.defined() ? static_cast<int64_t>(secondary_.nbytes()) : 0; }

 private:
  at::Tensor part(int rank) const;  // the rank's part of flat()
  void load_slice() const;
  void unload_slice(bool changed) const;
  void require_shape(size_t position) const;
  void point_back(size_t position) const;
  void move_parameters(const at::Storage& from, const at::Storage& to) const;
  at::Tensor encoded(const at::Tensor& values) const;

  BucketLayout layout_;
  std::vector<Parameter> parameters_;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;      // views of flat_, one for each parameter
  at::Tensor own_;                     // the slice of a sharded bucket
  at::Storage released_;               // the storage of its parameters while it is released
  std::string released_text_;          // the error text of released_
  bool hidden_ = false;                // released_ has another text than its own
  at::Storage coming_;                 // the storage of parameters during an arrival
  std::shared_ptr<SliceStore> store_;  // the store of own_; null: the bucket is not sharded
  bool in_store_ = false;              // store_ was given to shard()
  int bits_ = 0;                       // bits of an encoded own_
  at::Tensor secondary_;               // a copy of a sharded bucket for the ranks of a node
};

// Joins values of a bucket's parameters, by default their current ones, in one new flat tensor; padding is zero. Where
// `value` is undefined the contents are unspecified.
at::Tensor flatten(
    const BucketLayout& layout, const std::vector<Parameter>& parameters, const at::TensorOptions& options,
    const std::function<at::Tensor(const Parameter&)>& value = [](const Parameter& p) { return p.tensor.detach(); });

// Points `tensor` at the memory of `values`, which has its shape; the identity by which modules know it stays. A tensor
// on the meta device moves to the device of `values`.
void point_to(const at::Tensor& tensor, const at::Tensor& values);

// Leaves `tensor`, whose memory is gone, without elements: an operator that reads it fails in its check of shapes,
// where it would be a fault.
void take_elements(const at::Tensor& tensor);

// A view of `flat` with the shape of `like`, at a segment that covers a whole parameter.
at::Tensor view_of(const at::Tensor& flat, const Segment& segment, const at::Tensor& like);

}  // namespace ds::zero
