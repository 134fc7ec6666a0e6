// core/block_device_kernels.h for the simulated GPU: the same rules, one block after the other.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/block_device_kernels.h"
#include "tests/simulated_gpu/lone_team.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {
namespace {

Access bytes_at(const void* data, int64_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<size_t>(bytes), write};
}

Access block_values(const BlockArrays& arrays, const void* values, bool write) {
  return bytes_at(values, arrays.numel * (arrays.format == FloatFormat::kFloat32 ? 4 : 2), write);
}

Access encoded_blocks(const BlockArrays& arrays, const uint8_t* encoded, bool write) {
  return bytes_at(encoded, arrays.payload_bytes + arrays.blocks() * 4, write);
}

// Runs at once, after what the stream was given before.
const char* give_blocks(void* stream, std::string name, const std::vector<Access>& accesses,
                        std::function<void()> run) {
  Timeline& timeline = Timeline::instance();
  timeline.run_until(timeline.enqueue(number_of_handle(stream), std::move(name), accesses, std::move(run)));
  return nullptr;
}

const char* give_block_encode(const BlockArrays& arrays, const void* values, uint8_t* encoded, void* stream) {
  return give_blocks(stream, "encode of BlockCodec",
                     {block_values(arrays, values, false), encoded_blocks(arrays, encoded, true)}, [=] {
                       with_float_format(arrays.format, [&](auto format) {
                         const BlockEncodeRule<decltype(format)> rule(arrays, values, encoded);
                         for (int64_t block = 0; block < arrays.blocks(); ++block) rule(block, LoneTeam());
                       });
                     });
}

const char* give_block_sum(const BlockArrays& arrays, const BlockParts& parts, void* values, void* stream) {
  std::vector<Access> accesses{block_values(arrays, values, true)};
  for (int part = 0; part < parts.count; ++part) accesses.push_back(encoded_blocks(arrays, parts.of[part], false));
  return give_blocks(stream, "sum of BlockCodec", accesses, [=] {
    with_float_format(arrays.format, [&](auto format) {
      const BlockSumRule<decltype(format)> rule(arrays, parts, values);
      for (int64_t block = 0; block < arrays.blocks(); ++block) rule(block, LoneTeam());
    });
  });
}

constexpr BlockDeviceKernels kBlockKernels{give_block_encode, give_block_sum};

const bool kBlockKernelsRegistered = (set_block_device_kernels(&kBlockKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
