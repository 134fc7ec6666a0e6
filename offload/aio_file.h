// Reads and writes of large parts of a file that do not hold up the caller: io_uring and direct IO. Torch-free.
//
// The file is scratch space of one process (ZeRO-Infinity's NVMe offload, Rajbhandari et al., arXiv:2104.07857): see
// offload/unnamed_file.h for where it lies and what becomes of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/check.h"

namespace ds::offload {

// The `aio` section of ds_config, but for `use_gds` (offload/device_copies.h).
struct AioOptions {
  int64_t block_size = 1 << 20;      // bytes of one request; a multiple of AioFile::alignment()
  int64_t queue_depth = 8;           // requests of one transfer in flight, times intra_op_parallelism
  int64_t intra_op_parallelism = 1;  // DeepSpeed's number of threads with a queue each; here no thread is needed
  bool single_submit = false;        // hand each request to the kernel by itself
  bool overlap_events = true;        // false: the next queue_depth requests go out when the last ones are all back
};

// Transfers move by themselves with the default options: their requests are handed to the kernel at once, as
// queue_depth chains of linked requests, each of which starts the next. With single_submit, or without overlap_events,
// they move only inside calls of this class.
//
// The kernel continues a chain in the name of the thread that started it; what is left when that thread ends is started
// again by wait(). Calls must not overlap; they may come from several threads, one after the other. Memory belongs to
// the caller and must stay until the transfer is waited for. Transfers of overlapping parts of the file have no order
// between them.
//
// When the kernel refuses requests, or takes none for 30 s, the file is given up: that call and every later one throws
// IoError with the reason. Nothing is in flight any more then, and no memory is touched.
class AioFile {
 public:
  using Ticket = int64_t;

  // Opens `folder`/`name` and reserves `bytes` (rounded up to alignment()), which read as zeros. `what`: the setting
  // that `folder` comes from. Throws ConfigError as UnnamedFile does, and when `options` do not fit or io_uring is not
  // permitted (in a container whose seccomp profile forbids it, or by the sysctl kernel.io_uring_disabled).
  AioFile(const std::string& folder, const std::string& name, int64_t bytes, const AioOptions& options,
          const std::string& what);
  // Waits for everything in flight; errors that nobody waited for are lost.
  ~AioFile();
  AioFile(const AioFile&) = delete;
  AioFile& operator=(const AioFile&) = delete;

  // Bytes that offsets, lengths and memory addresses are multiples of. Enough for every disk whose blocks are no
  // larger; others are refused.
  static constexpr int64_t alignment() { return 4096; }

  int64_t bytes() const;
  const std::string& path() const;
  // The descriptor of the file, open for direct IO.
  int descriptor() const;

  // Start a transfer. Throw UsageError for a part that is not aligned, or not within the file, IoError when the file is
  // given up.
  Ticket read(int64_t offset, void* memory, int64_t bytes);
  Ticket write(int64_t offset, const void* memory, int64_t bytes);
  // Whether wait() would return, or throw, at once. Moves transfers on.
  bool done(Ticket ticket);
  // Returns when all bytes have moved. Throws IoError naming file, offset, length and the system's reason; then some of
  // the bytes may have moved and the file can be used on, unless it is given up. A ticket is good for one wait().
  void wait(Ticket ticket);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds::offload
