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

// A parameter of the model. `tensor` shares its identity with the module's (set_data changes both).
// Of a parameter that is split over a tensor axis `tensor` is the leaf, which has this rank's part alone.
struct Parameter {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const TensorPart> part = nullptr;  // which part of the parameter `tensor` is; null: the whole

  // Of the whole parameter.
  std::vector<int64_t> whole_sizes() const { return part ? part->whole_sizes() : tensor.sizes().vec(); }
};

// Owns `flat` ([layout.numel], the model's dtype and device). Padding holds zeros. Not thread safe.
//
// A sharded bucket (stage 3) owns its rank's slice, as it is or encoded (core/numbers/block_codec.h), and the memory of
// `flat` comes and goes: all views of it, those that autograd saved too, share one storage, so that they are whole
// again as soon as the storage is.
class ParameterBucket {
 public:
  // `values` are the float32 (or original dtype) values of the whole bucket, as made by `flatten`; the bucket is
  // allocated in `dtype` on the parameters' device and the parameters are re-pointed into it.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters, const at::Tensor& values,
                  at::ScalarType dtype);

  // The parameters stay where they are, and flat() is undefined: for gradients alone.
  ParameterBucket(BucketLayout layout, const std::vector<Parameter>& parameters);

  const BucketLayout& layout() const { return layout_; }
  // In the order of layout().segments.
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // "3 (h.2.attn.qkv.weight, 5 more)", for messages.
  std::string describe(size_t index) const;
  // Dtype and device of the parameters.
  at::TensorOptions options() const { return (flat_.defined() ? flat_ : parameters_.front().tensor).options(); }
  // Has no memory while a sharded bucket is released.
  const at::Tensor& flat() const { return flat_; }
  // The part that rank `rank` owns: a view of flat() or, of a sharded bucket, what it keeps (`rank` is this one then).
  // Not of an encoded one.
  at::Tensor slice(int rank) const;

  // Keeps a copy of slice `rank` in `store` (null: beside flat()) and releases the rest. `bits` 8: the copy is encoded,
  // and so loses precision.
  void shard(int rank, int bits = 0, std::shared_ptr<SliceStore> store = nullptr);
  // Calls `use` while slice() and encoded_slice() of a sharded bucket have memory. `changes`: what it writes is kept.
  void use_slice(bool changes, const std::function<void()>& use) const;
  // Around a gather: the slice of `rank`, this one, encoded or not, to be read alone; see core/slices/slice_store.h.
  at::Tensor begin_gather(int rank) const {
    if (store_) return store_->begin_gather(own_);
    return sharded() ? own_ : slice(rank);
  }
  void end_gather() const {
    if (store_) store_->end_gather(own_);
  }
  void prefetch_slice() const;
  bool slice_has_room() const { return !store_ || store_->has_room(); }
  // Bits of an encoded slice, else 0; the slice.
  int bits() const { return bits_; }
  const at::Tensor& encoded_slice() const { return own_; }
  // What this rank holds from step to step: of a sharded bucket its slice, encoded or not, else flat().
  const at::Tensor& kept() const { return sharded() ? own_ : flat_; }
  bool sharded() const { return own_.defined(); }
  // Of a sharded bucket: takes memory for flat(), with unspecified contents; gives it back. While it has none the
  // parameters, but for those that the program has given other memory, lie in released_storage(): whoever reads one
  // unseen is told so.
  void allocate(GatherMemory& memory);
  void release(GatherMemory& memory);
  const at::Storage& released_storage() const { return released_; }
  // Of a bucket with memory: an alias of a parameter that was made while that was released or on its way
  // (Tensor::data()) sees the memory too, from now on.
  void show(const at::Tensor& tensor) const;
  // Of a bucket that is not sharded: while the parts of other ranks are on their way to flat(), its parameters lie in
  // coming_storage(), and whoever reads one unseen is told so; show() for an operator that is to read a tensor there.
  void begin_arrival();
  void end_arrival();
  const at::Storage& coming_storage();
  // What whoever reads a parameter of a released bucket is told; {} in it is the parameter's name.
  void tell_when_released(std::string text);
  // Until the next allocate(), whoever reads the parameters gets a c10::Error with `text`.
  void hide(const std::string& text);
  // The same for good, also for views of the parameters.
  void end(const std::string& text);
  bool allocated() const { return flat_.storage().nbytes() > 0; }
  // The program may give a parameter other memory (torch::load, set_data). Of a bucket with memory: copies what such
  // ones hold to flat(), in its dtype, and points them there again. Throws UsageError for another shape.
  void take_values_back() const;
  // The same without the values: they hold what flat() does. Returns one of them, or null.
  const Parameter* take_parameters_back() const;
  // Of one parameter, with memory or without, and not of an encoded bucket: the values go to what this rank keeps, and
  // are returned. `rank` owns the slice of a sharded bucket.
  at::Tensor take_value_back(size_t position, int rank);
  // Whether the parameter at `position` lies where it was put, with the dtype that it had.
  bool is_here(size_t position) const;
  // Of a sharded, allocated bucket: the own slice becomes what flat() holds.
  void keep_changes(int rank);
  // Of a sharded, allocated bucket: keeps a copy of part `rank` of `ranks` equal ones, until it is dropped.
  void keep_secondary(int rank, int ranks);
  void drop_secondary() { secondary_.reset(); }
  const at::Tensor& secondary() const { return secondary_; }
  // Bytes this rank holds now, but for those of the secondary slice and of a slice that a given store has.
  int64_t held_bytes() const;
  // Of a slice that a given store has.
  int64_t stored_bytes() const { return in_store_ ? static_cast<int64_t>(own_.nbytes()) : 0; }
  int64_t secondary_bytes() const { return secondary_.defined() ? static_cast<int64_t>(secondary_.nbytes()) : 0; }

 private:
  at::Tensor part(int rank) const;  // of flat()
  void load_slice() const;
  void unload_slice(bool changed) const;
  void require_shape(size_t position) const;
  void point_back(size_t position) const;
  void move_parameters(const at::Storage& from, const at::Storage& to) const;
  at::Tensor encoded(const at::Tensor& values) const;

  BucketLayout layout_;
  std::vector<Parameter> parameters_;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;      // of flat_, one for each parameter
  at::Tensor own_;                     // of a sharded bucket
  at::Storage released_;               // likewise
  std::string released_text_;          // of it
  bool hidden_ = false;                // released_ has another text than its own
  at::Storage coming_;                 // of one that is not sharded
  std::shared_ptr<SliceStore> store_;  // of own_
  bool in_store_ = false;              // that shard() was given
  int bits_ = 0;                       // own_ is encoded in so many
  at::Tensor secondary_;               // of a sharded bucket, a copy for the ranks of a node
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
