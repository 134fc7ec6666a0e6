// Where the slices live that a rank keeps of sharded parameters: beside the parameters, in host memory, in a file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace ds {

// Not thread safe. This one keeps slices on a device.
class SliceStore {
 public:
  explicit SliceStore(at::Device device = at::kCPU) : device_(device) {}
  virtual ~SliceStore() = default;
  SliceStore(const SliceStore&) = delete;
  SliceStore& operator=(const SliceStore&) = delete;

  // A flat slice, loaded, with unspecified contents.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device_));
  }
  // Around every use of a slice's elements: between them it has memory. `changed`: its elements are to be kept. Pairs
  // of one slice may nest.
  virtual void load(const at::Tensor& /*slice*/) {}
  virtual void unload(const at::Tensor& /*slice*/, bool /*changed*/) {}
  // Around a gather of the slice: its elements, to be read alone, which may be a copy on the device that gathers.
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
