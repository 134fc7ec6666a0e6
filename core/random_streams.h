// Random numbers: streams of our own, and the states of the default generators.
//
// A stream is a pure function of names, the same in every process, however much was drawn before. Streams are for what
// ranks must draw alike although they draw other things too (tokens of an expert that all have), and for what they must
// draw apart (noise on parts of their own): coordinates that are named make the difference, those that are left out do
// not. Dropout of split tensors needs none (parallel/rules/random.cc): it draws the mask of the whole from the default
// generator on every rank.
//
// Nothing of a stream is kept: a step that is computed again, or resumed, has its numbers again. The mixing function is
// that of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Any thread.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace ds {

struct RandomStream {
  uint64_t seed = 0;  // the seed of the run
  int64_t step = 0;
  int64_t micro_batch = 0;
  std::string_view purpose = {};          // who draws, and for what: "h.0.moe.gate noise"
  std::vector<int64_t> coordinates = {};  // the rank's place along the axes over which draws are to differ
};

// The key of a stream. Streams that differ in one number or letter have keys without any relation.
uint64_t key_of(const RandomStream& stream);
// A new generator at the stream's begin. On the CPU it is seeded by 32 bits of the key alone (LibTorch's Mersenne
// twister): of 10,000 streams two are the same with a probability of one in a hundred.
at::Generator generator_of(const RandomStream& stream, c10::Device device = c10::kCPU);

// Returns the default generator of the CPU and, where `device` is another one, that of the device.
std::vector<at::Generator> default_generators(c10::Device device);
// Returns a copy of a generator's state, on the host. Whoever draws meanwhile waits.
at::Tensor generator_state(at::Generator generator);
// Takes up a state that generator_state() returned of a generator of the same kind. Whoever draws meanwhile waits.
void set_generator_state(at::Generator generator, const at::Tensor& state);

// Leaves the default generator of the CPU as it was, whatever is drawn from it while this lives.
class KeptGenerator {
 public:
  KeptGenerator();
  ~KeptGenerator();
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  at::Tensor state_;
};

}  // namespace ds
