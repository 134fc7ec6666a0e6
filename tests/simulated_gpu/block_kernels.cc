// core/numbers/block_device_kernels.h for the simulated GPU: the same rules, one block after the other.
#include <vector>

#include "core/numbers/block_device_kernels.h"
#include "tests/simulated_gpu/kernel_work.h"
#include "tests/simulated_gpu/lone_team.h"

namespace ds::simulated_gpu {
namespace {

Access block_values(const BlockArrays& arrays, const void* values, bool write) {
  return access_to(values, arrays.numel * bytes_of(arrays.format), write);
}

Access encoded_blocks(const BlockArrays& arrays, const uint8_t* encoded, bool write) {
  return access_to(encoded, arrays.payload_bytes + arrays.blocks() * 4, write);
}

const char* give_block_encode(const BlockArrays& arrays, const void* values, uint8_t* encoded, void* stream) {
  return run_kernel(stream, "encode of BlockCodec",
                    {block_values(arrays, values, false), encoded_blocks(arrays, encoded, true)}, [=] {
                      with_block_packs(arrays.format, values, &encoded, 1, [&](auto format, auto pack) {
                        const BlockEncodeRule<decltype(format), decltype(pack)::value> rule(arrays, values, encoded);
                        for (int64_t block = 0; block < arrays.blocks(); ++block) rule(block, LoneTeam());
                      });
                    });
}

const char* give_block_sum(const BlockArrays& arrays, const BlockParts& parts, void* values, void* stream) {
  std::vector<Access> accesses{block_values(arrays, values, true)};
  for (int part = 0; part < parts.count; ++part) accesses.push_back(encoded_blocks(arrays, parts.of[part], false));
  return run_kernel(stream, "sum of BlockCodec", accesses, [=] {
    with_block_packs(arrays.format, values, parts.of, parts.count, [&](auto format, auto pack) {
      const BlockSumRule<decltype(format), decltype(pack)::value> rule(arrays, parts, values);
      for (int64_t block = 0; block < arrays.blocks(); ++block) rule(block, LoneTeam());
    });
  });
}

constexpr BlockDeviceKernels kBlockKernels{give_block_encode, give_block_sum};

const bool kBlockKernelsRegistered = (set_device_functions(&kBlockKernels), true);

}  // namespace
}  // namespace ds::simulated_gpu
