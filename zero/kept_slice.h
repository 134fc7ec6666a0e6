// The slice that a rank keeps of a sharded bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "core/slices/slice_store.h"

namespace ds::zero {

// This rank's slice of a sharded bucket (stage 3), as it is or encoded (core/numbers/block_codec.h), in a store that
// gives it memory while it is used. Default constructed: the bucket is not sharded, and there is no slice. Not thread
// safe.
class KeptSlice {
 public:
  KeptSlice() = default;
  // Copies `values` to `store` (null: beside them, on their device). `bits` 8: the copy is encoded, and so loses
  // precision.
  KeptSlice(const at::Tensor& values, int bits, const std::shared_ptr<SliceStore>& store);

  // Takes over `slice` itself, on the device of its bucket.
  explicit KeptSlice(at::Tensor slice);

  bool defined() const { return slice_.defined(); }
  // The bits of the elements of an encoded slice, else 0.
  int bits() const { return bits_; }
  // The elements of the slice, or the bytes that encode them. They have memory inside of use() and of a gather.
  const at::Tensor& tensor() const { return slice_; }

  // Calls `call` while the slice has memory. `changes`: what it writes is kept. Only calls it where there is no slice.
  void use(bool changes, const std::function<void()>& call) const;
  // Replaces the elements by `values`, which are encoded where the slice is.
  void write(const at::Tensor& values);

  // Called around a gather of the slice, see core/slices/slice_store.h. begin_gather() returns the elements, or the
  // bytes that encode them, to be read alone.
  at::Tensor begin_gather() const { return store_->begin_gather(slice_); }
  void end_gather() const {
    if (store_) store_->end_gather(slice_);
  }
  // Says that the slice will be gathered soon.
  void prefetch() const {
    if (store_) store_->prefetch(slice_);
  }
  // Whether the store can give this slice to a gather now, beside those that are being gathered.
  bool has_room() const { return !store_ || store_->has_room(); }

  // The bytes of a slice that lies beside the parameters.
  int64_t held_bytes() const { return in_given_store_ ? 0 : bytes(); }
  // The bytes of a slice that lies in a store which was given.
  int64_t stored_bytes() const { return in_given_store_ ? bytes() : 0; }

 private:
  int64_t bytes() const { return defined() ? static_cast<int64_t>(slice_.nbytes()) : 0; }
  at::Tensor encoded(const at::Tensor& values) const;

  at::Device device_ = at::kCPU;  // the device of the bucket, where gathers read the slice
  int bits_ = 0;
  at::Tensor slice_;
  std::shared_ptr<SliceStore> store_;  // null: there is no slice
  bool in_given_store_ = false;        // store_ was given to the constructor
};

}  // namespace ds::zero
