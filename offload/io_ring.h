// io_uring for one file: requests in, answers out. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

struct io_uring;  // NOLINT(readability-identifier-naming): liburing's

namespace ds::offload {

// The ring of one file. Not thread safe. Requests in flight when it is destroyed may still move: see settle().
class IoRing {
 public:
  // Makes a ring for at most so many requests at once. `what`: the setting that asks for it. Throws ConfigError when
  // io_uring is not permitted or the kernel is too old.
  IoRing(int descriptor, unsigned requests, const std::string& what);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // Prepares a request, kept until the next submit(). A linked one is followed by another, which starts when it has
  // fully succeeded and is cancelled otherwise.
  void prepare(bool writes, void* memory, int64_t bytes, int64_t offset, uint64_t id, bool linked);
  // Hands over what is prepared and waits for so many answers (0 or 1). Returns false when the kernel could not take
  // requests for the moment. Throws IoError.
  bool submit(unsigned answers);
  // Takes the next answer, if there is one: the request's id, and bytes moved or -errno.
  bool take(uint64_t& id, int& result);
  // Returns when nothing that was handed over is in flight any more; what is only prepared stays with this ring. Their
  // answers are lost. Nothing but destruction may follow: a submit() would hand over what was prepared long ago.
  void settle() noexcept;

 private:
  std::unique_ptr<io_uring> ring_;
  uint64_t prepared_ = 0;  // requests since the start
  uint64_t taken_ = 0;     // answers
  int descriptor_;
};

}  // namespace ds::offload
