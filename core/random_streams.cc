#include "core/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "core/splitmix64.h"

namespace ds {
namespace {

// Takes one number after another; not commutative.
struct Chain {
  uint64_t state = 0;
  void take(uint64_t value) { state = splitmix64(state ^ splitmix64(value)); }
};

}  // namespace

uint64_t key_of(const RandomStream& stream) {
  Chain chain;
  chain.take(stream.seed);
  chain.take(static_cast<uint64_t>(stream.step));
  chain.take(static_cast<uint64_t>(stream.micro_batch));
  // Lengths too, so that no letter passes for a coordinate.
  chain.take(stream.purpose.size());
  for (const char letter : stream.purpose) chain.take(static_cast<unsigned char>(letter));
  chain.take(stream.coordinates.size());
  for (const int64_t coordinate : stream.coordinates) chain.take(static_cast<uint64_t>(coordinate));
  return chain.state;
}

at::Generator generator_of(const RandomStream& stream, c10::Device device) {
  const uint64_t key = key_of(stream);
  if (device.is_cpu()) return at::detail::createCPUGenerator(key);
  at::Generator generator;
  {
    at::Generator common = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(common.mutex());
    generator = common.clone();
  }
  generator.set_current_seed(key);
  return generator;
}

std::vector<at::Generator> default_generators(c10::Device device) {
  std::vector<at::Generator> generators = {at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  return generators;
}

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

KeptGenerator::KeptGenerator() : state_(generator_state(at::detail::getDefaultCPUGenerator())) {}

KeptGenerator::~KeptGenerator() { set_generator_state(at::detail::getDefaultCPUGenerator(), state_); }

}  // namespace ds
