#include "tools/tensor_cost.h"

#include <algorithm>
#include <limits>

#include "tools/data_parallel_cost.h"

namespace ds::tool {

StageSums sums_of(std::vector<LayerCost>::const_iterator begin, std::vector<LayerCost>::const_iterator end,
                  int64_t tensor, bool recomputed) {
  const double share = 2 * static_cast<double>(tensor - 1) / static_cast<double>(tensor);
  StageSums sums;
  for (auto layer = begin; layer != end; ++layer) {
    const int backward = layer->backward_sums + (recomputed ? layer->forward_sums : 0);
    sums.forward_bytes += share * layer->forward_sums * layer->summed_bytes;
    sums.backward_bytes += share * backward * layer->summed_bytes;
    sums.forward_count += layer->forward_sums;
    sums.backward_count += backward;
  }
  return sums;
}

double tensor_rate(const Machine& machine, int64_t tensor) {
  Traffic traffic(machine);
  std::vector<Ring> rings;
  for (int64_t first = 0; first < machine.ranks; first += tensor) {
    rings.push_back({.first = first, .members = tensor});
    traffic.add(rings.back());
  }
  double rate = std::numeric_limits<double>::infinity();
  for (const Ring& ring : rings) rate = std::min(rate, traffic.rate(ring));
  return rate;
}

pipeline::StageTimes seconds_of(const StageSums& sums, const Machine& machine, int64_t tensor, double beside) {
  const double rate = tensor_rate(machine, tensor);
  const double latency = 2 * static_cast<double>(tensor - 1) * machine.latency;  // there and back around the ring
  pipeline::StageTimes times{};
  times.forward = sums.forward_bytes / rate + sums.forward_count * latency;
  times.backward_input = sums.backward_bytes / rate + sums.backward_count * latency;
  times.backward_weight = 0;
  if (beside > 0) {
    times.backward_input = exposed_seconds(times.backward_input, beside, std::max(1, sums.backward_count));
  }
  return times;
}

}  // namespace ds::tool
