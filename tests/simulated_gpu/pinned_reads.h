// What streams have read of pinned memory and the host has not waited for: it must still be there when the host does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ds::simulated_gpu {

class PinnedReads {
 public:
  struct Read {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    size_t stream = 0;
    uint64_t time = 0;  // of the stream
    std::string name;
  };

  // The bytes are as the stream has read them.
  void add(Read read);
  // Forgets the reads that `over` says true of, and returns those whose bytes have changed meanwhile.
  std::vector<Read> end(const std::function<bool(const Read&)>& over);

 private:
  struct Kept {
    Read read;
    size_t hash = 0;
  };
  std::vector<Kept> reads_;
};

}  // namespace ds::simulated_gpu
