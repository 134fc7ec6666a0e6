// Slices of parameters in a file (offload_param: nvme), read into host memory when they are gathered (ZeRO-Infinity,
// Rajbhandari et al., arXiv:2104.07857, section 6.1). Part of them may stay in host memory for good (max_in_cpu).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/slices/slice_store.h"
#include "offload/aio_file.h"
#include "offload/device_copies.h"
#include "offload/pinned_arena.h"
#include "offload/slice_buffers.h"
#include "offload/tensor_file.h"

namespace ds::offload {

// A slice that is not loaded has no memory: its tensor gets that of a buffer with load(), and what a buffer holds is
// read again only when another slice has used it since. Writes go on behind the caller. Throws IoError. What a failed
// write was to keep is lost: from then on every load() throws IoError with the reason, as it does for what has to be
// read from a file that is given up (offload/aio_file.h).
class FileSlices final : public SliceStore {
 public:
  // Bytes of the file for slices of these sizes (in bytes), and of one buffer for all of them.
  static int64_t file_bytes(const std::vector<int64_t>& sizes) { return TensorFile::file_bytes(sizes); }
  static int64_t buffer_bytes(const std::vector<int64_t>& sizes);

  // `sizes`: bytes of the slices that go to the file, in the order in which they are allocated. `buffers`: at least
  // one, flat bytes in host memory, each buffer_bytes(sizes) long. `kept`: memory of the slices that stay in host
  // memory, the first `kept_count` that are allocated; may be null when these have no elements. `device`: whose current
  // stream is given copies of loaded slices, before unload(). A buffer waits for them before another slice gets it.
  FileSlices(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes, std::vector<at::Tensor> buffers,
             std::shared_ptr<PinnedArena> kept, size_t kept_count, at::Device device = at::kCPU);
  // Makes gathers read slices of the file straight into `buffers` from now on, which are as those of DeviceCopies.
  // Throws ConfigError.
  void gather_on_device(std::vector<at::Tensor> buffers);

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override;
  void load(const at::Tensor& slice) override;
  void unload(const at::Tensor& slice, bool changed) override;
  at::Tensor begin_gather(const at::Tensor& slice) override;
  void end_gather(const at::Tensor& slice) override;
  void prefetch(const at::Tensor& slice) override;
  bool has_room() const override;

 private:
  int64_t index_of(const at::Tensor& slice) const;  // -1: stays in host memory
  FilePart part_of(int64_t index, const at::Tensor& slice) const;

  SliceBuffers buffers_;
  std::vector<at::Tensor> slices_;
  std::unordered_map<const void*, int64_t> index_;  // by storage
  std::shared_ptr<PinnedArena> kept_;
  size_t kept_left_;  // slices to be allocated there
  at::Device device_;
  std::unique_ptr<DeviceCopies> copies_;  // null: gathers read what is in host memory
};

}  // namespace ds::offload
