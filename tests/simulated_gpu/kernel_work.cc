#include "tests/simulated_gpu/kernel_work.h"

#include <utility>

#include "tests/simulated_gpu/streams.h"

namespace ds::simulated_gpu {

Access access_to(const void* data, int64_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<size_t>(bytes), write};
}

const char* run_kernel(void* stream, std::string name, const std::vector<Access>& accesses, std::function<void()> run) {
  Timeline& timeline = Timeline::instance();
  timeline.run_until(timeline.enqueue(number_of_handle(stream), std::move(name), accesses, std::move(run)));
  return nullptr;
}

}  // namespace ds::simulated_gpu
