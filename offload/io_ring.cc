#include "offload/io_ring.h"

#include <liburing.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::offload {
namespace {

void require_set_up(int error, const std::string& what) {
  require<ConfigError>(
      error != EPERM && error != EACCES, what, ": io_uring is not permitted here (", SystemReason(error),
      "), and a disk cannot be used without it; expected kernel.io_uring_disabled = 0 (sysctl) and, in "
      "a container, a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register "
      "(docker: --security-opt seccomp=PROFILE); or set the device to \"cpu\"");
  require<ConfigError>(
      error != ENOSYS, what, ": this kernel has no io_uring (", SystemReason(error),
      "), and a disk cannot be used without it; use Linux 5.12 or later, or set the device to \"cpu\"");
  require<ConfigError>(error != ENOMEM, what, ": no memory for io_uring's queues (", SystemReason(error),
                       "); raise `ulimit -l`");
  require<IoError>(error == 0, what, ": cannot set up io_uring: ", SystemReason(error));
}

}  // namespace

IoRing::IoRing(int descriptor, unsigned requests, const std::string& what)
    : ring_(std::make_unique<io_uring>()), descriptor_(descriptor) {
  require_set_up(-io_uring_queue_init(requests, ring_.get(), 0), what);
  if ((ring_->features & IORING_FEAT_NATIVE_WORKERS) != 0) return;
  io_uring_queue_exit(ring_.get());
  throw ConfigError(cat(what,
                        ": expected Linux 5.12 or later for io_uring, found an older kernel; update it, or set the "
                        "device to \"cpu\""));
}

IoRing::~IoRing() { io_uring_queue_exit(ring_.get()); }

void IoRing::prepare(bool writes, void* memory, int64_t bytes, int64_t offset, uint64_t id, bool linked) {
  io_uring_sqe* const request = io_uring_get_sqe(ring_.get());
  ensure(request != nullptr, "no more requests are prepared than io_uring's queue holds");
  if (writes) {
    io_uring_prep_write(request, descriptor_, memory, static_cast<unsigned>(bytes), static_cast<uint64_t>(offset));
  } else {
    io_uring_prep_read(request, descriptor_, memory, static_cast<unsigned>(bytes), static_cast<uint64_t>(offset));
  }
  io_uring_sqe_set_flags(request, linked ? IOSQE_IO_LINK : 0U);
  io_uring_sqe_set_data64(request, id);
  ++prepared_;
}

bool IoRing::submit(unsigned answers) {
  int result = 0;
  do {
    result = io_uring_submit_and_wait(ring_.get(), answers);
  } while (result == -EINTR);
  if (result == -EAGAIN || result == -EBUSY) return false;
  require<IoError>(result >= 0, "io_uring: cannot hand over requests: ", SystemReason(-result));
  return true;
}

bool IoRing::take(uint64_t& id, int& result) {
  io_uring_cqe* answer = nullptr;
  if (io_uring_peek_cqe(ring_.get(), &answer) != 0) return false;
  id = io_uring_cqe_get_data64(answer);
  result = answer->res;
  io_uring_cqe_seen(ring_.get(), answer);
  ++taken_;
  return true;
}

void IoRing::settle() noexcept {
  // The requests that the kernel has not taken are the end of the queue.
  const uint64_t handed_over = prepared_ - io_uring_sq_ready(ring_.get());
  uint64_t id = 0;
  int result = 0;
  while (taken_ < handed_over) {
    if (take(id, result)) continue;
    io_uring_cqe* answer = nullptr;
    // Unlike a submission this hands nothing over. Where it is refused, answers arrive all the same.
    if (io_uring_wait_cqe(ring_.get(), &answer) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ds::offload
