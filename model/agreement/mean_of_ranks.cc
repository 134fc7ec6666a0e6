#include "model/agreement/mean_of_ranks.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "comm/rank_numbers.h"

namespace ds::engine {

double mean_of_ranks(double value, c10::Device device, comm::Communicator& world, const char* label) {
  const std::vector<int64_t> bits = comm::numbers_of_ranks(world, device, {std::bit_cast<int64_t>(value)}, label);
  if (std::all_of(bits.begin(), bits.end(), [&](int64_t other) { return other == bits.front(); })) return value;
  double sum = 0;
  for (const int64_t of_rank : bits) sum += std::bit_cast<double>(of_rank);
  return sum / static_cast<double>(bits.size());
}

}  // namespace ds::engine
