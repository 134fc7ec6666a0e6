#include "data/batch_sampler.h"

namespace ds::engine {

uint64_t digest_of(const SamplerState& state) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd: multiplication loses nothing
  uint64_t digest = 0;
  const auto take = [&digest](auto number) { digest = digest * kFactor + static_cast<uint64_t>(number); };
  take(state.epoch);
  take(state.next_sample);
  take(state.seed);
  if (!state.curriculum) return digest;
  const efficiency::CurriculumPosition& position = *state.curriculum;
  take(position.batches);
  take(position.batch_size);
  take(position.taken);
  take(position.files);
  for (const auto& cluster : position.clusters) {
    for (const int64_t difficulty : cluster.difficulties) take(difficulty);
    take(cluster.drawn);
  }
  return digest;
}

}  // namespace ds::engine
