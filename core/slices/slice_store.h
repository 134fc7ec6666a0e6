// The memory where the slices live that a rank keeps of sharded parameters: beside the parameters, in host memory, in a
// file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace ds {

// A store of slices; this one keeps them on a device. Not thread safe.
class SliceStore {
 public:
  explicit SliceStore(at::Device device = at::kCPU) : device_(device) {}
  virtual ~SliceStore() = default;
  SliceStore(const SliceStore&) = delete;
  SliceStore& operator=(const SliceStore&) = delete;

  // Makes a flat slice, loaded, with unspecified contents.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device_));
  }
  // Called around every use of a slice's elements: between the two it has memory. `changed`: its elements are to be
  // kept. Pairs for one slice may nest.
  virtual void load(const at::Tensor& /*slice*/) {}
  virtual void unload(const at::Tensor& /*slice*/, bool /*changed*/) {}
  // Called around a gather of the slice. Returns its elements, to be read alone, which may be a copy on the device that
  // gathers.
  virtual at::Tensor begin_gather(const at::Tensor& slice) {
    load(slice);
    return slice;
  }
  virtual void end_gather(const at::Tensor& slice) { unload(slice, /*changed=*/false); }
  // Says that the slice will be gathered soon.
  virtual void prefetch(const at::Tensor& /*slice*/) {}
  // Whether another slice can be gathered now, beside those that are.
  virtual bool has_room() const { return true; }

 private:
  at::Device device_;
};

}  // namespace ds
