// Copies between a device and the host, in order, beside what the device computes.
//
// Written against c10's virtual device interface: no CUDA header, and the same code whatever the device. On the CPU the
// calling thread copies at once and every wait is over.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace ds {

// One caller at a time. "The current stream" is that of the calling thread on this device. Device memory may be freed
// right after a call, LibTorch's allocator waits for the copies; host memory has to stay until the copy is done, and is
// read or written beside the device only if it is pinned (offload/pinned_arena.h).
class TransferStream {
 public:
  // A point in the stream's order; default constructed: passed already.
  class Mark {
   public:
    Mark() = default;

   private:
    friend class TransferStream;
    std::shared_ptr<c10::Event> event_;
  };

  explicit TransferStream(at::Device device);
  // Waits for all copies.
  ~TransferStream();
  TransferStream(const TransferStream&) = delete;
  TransferStream& operator=(const TransferStream&) = delete;

  // Begins a copy, after everything that the current stream was given before. Equal sizes, both contiguous; dtypes may
  // differ, they are converted on the device.
  Mark copy(const at::Tensor& to, const at::Tensor& from);
  // Begins a copy from or to device memory that the caller keeps until wait_on_device() of the mark: LibTorch's
  // allocator need not know of the copy, and gives the memory out again at once when it is freed then.
  Mark copy_of_kept(const at::Tensor& to, const at::Tensor& from);
  // Returns `host` on the device, or itself where it is there already, for the work that the calling thread's current
  // stream is given from now on. Neither the host nor the copy waits for what the device has to do before; the bytes
  // are copied to pinned memory first, so that `host` may change at once. A tensor that requires a gradient is copied
  // as a part of its graph, which waits; so is one that is not strided (sparse).
  at::Tensor upload(const at::Tensor& host);
  // Returns when the copies up to the mark are done.
  static void wait_on_host(Mark& mark);
  // Makes all work that the current stream is given from now on wait for the copies up to the mark; the host does not
  // wait.
  void wait_on_device(const Mark& mark);
  // While the result lives, this stream is the calling thread's current one: what it is given comes after the copies,
  // and what the stream of before is given does not wait for it. Memory that is taken meanwhile belongs to this stream.
  c10::OptionalStreamGuard as_current() const;

 private:
  Mark start(const at::Tensor& to, const at::Tensor& from, bool kept);

  at::Device device_;
  std::optional<c10::Stream> stream_;  // none on the CPU
};

}  // namespace ds
