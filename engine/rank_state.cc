#include "engine/rank_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>
#include <torch/serialize.h>

#include <cstring>
#include <mutex>
#include <sstream>
#include <typeinfo>

#include "checkpoint/block_checksum.h"
#include "core/check.h"

namespace ds::engine {
namespace {

constexpr const char* kHostGenerator = "rng.cpu";
constexpr const char* kDeviceGenerator = "rng.device";
constexpr const char* kClientOptimizer = "client_optimizer";

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// As torch::save writes it.
at::Tensor serialized(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string text = stream.str();
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

// In place of all that the optimizer has.
void take_serialized(const Engine::Impl& impl, const at::Tensor& bytes) {
  std::istringstream stream(std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
  torch::serialize::InputArchive archive;
  archive.load_from(stream, impl.device);
  impl.client_optimizer->state().clear();
  impl.client_optimizer->load(archive);
}

// Bit patterns of checksums of the buffers' contents.
at::Tensor checksums_of(const NamedTensors& buffers) {
  const at::Tensor sums = at::zeros({static_cast<int64_t>(buffers.size())}, at::kLong);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& values = buffers[i].second;
    sums.mutable_data_ptr<int64_t>()[i] =
        static_cast<int64_t>(checkpoint::checksum(values.const_data_ptr(), values.nbytes()));
  }
  return sums;
}

// Flat, by their paths in a checkpoint.
NamedTensors at_paths(int rank, const char* folder, const NamedTensors& memory) {
  NamedTensors result;
  for (const auto& [name, values] : memory) {
    result.emplace_back(checkpoint::rank_path(rank, cat(folder, name)), values.view({-1}));
  }
  return result;
}

}  // namespace

NamedTensors optimizer_memory(const Engine::Impl& impl) {
  if (!impl.optimizer) return {};
  return at_paths(impl.world->rank(), "optimizer.", impl.optimizer->rank_states());
}

NamedTensors shared_optimizer_memory(const Engine::Impl& impl) {
  if (!impl.optimizer) return {};
  return at_paths(impl.first_of_part(), "optimizer.", impl.optimizer->shared_states());
}

NamedTensors compression_memory(const Engine::Impl& impl) {
  if (!impl.reduction) return {};
  return at_paths(impl.world->rank(), "gradient_compression.", impl.reduction->memory());
}

checkpoint::OptimizerState client_optimizer_state(const torch::optim::Optimizer& optimizer) {
  checkpoint::OptimizerState state{.type = c10::demangle(typeid(optimizer).name()), .step_count = 0, .groups = {}};
  for (const double lr : learning_rates(optimizer)) state.groups.push_back({.lr = lr});
  return state;
}

BufferCopies copy_buffers(const Engine::Impl& impl) {
  BufferCopies copies;
  for (const auto& item : impl.module->named_buffers()) {
    if (impl.pipeline && impl.pipeline->is_copy(item.key())) continue;
    copies.values.emplace_back(item.key(),
                               item.value().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true).contiguous());
  }
  copies.checksums = checksums_of(copies.values);
  return copies;
}

void add_buffers(const Engine::Impl& impl, const BufferCopies& copies, NamedTensors& tensors) {
  if (copies.values.empty()) return;
  const at::Tensor& own = copies.checksums;
  at::Tensor first = own.clone().to(impl.device);
  if (impl.communicator->size() > 1) impl.communicator->broadcast(first, 0, "checksums of buffers").wait();
  first = first.to(at::kCPU);
  for (size_t i = 0; i < copies.values.size(); ++i) {
    const auto& [name, values] = copies.values[i];
    if (impl.communicator->rank() == 0) {
      tensors.emplace_back(checkpoint::buffer_path(name), values);
    } else if (first.const_data_ptr<int64_t>()[i] != own.const_data_ptr<int64_t>()[i]) {
      tensors.emplace_back(checkpoint::rank_path(impl.world->rank(), checkpoint::buffer_path(name)), values);
    }
  }
}

NamedTensors rank_tensors(const Engine::Impl& impl) {
  const int rank = impl.world->rank();
  NamedTensors tensors;
  tensors.emplace_back(checkpoint::rank_path(rank, kHostGenerator),
                       generator_state(at::detail::getDefaultCPUGenerator()));
  if (!impl.device.is_cpu()) {
    tensors.emplace_back(checkpoint::rank_path(rank, kDeviceGenerator),
                         generator_state(at::globalContext().defaultGenerator(impl.device)));
  }
  if (impl.client_optimizer && rank == 0) {
    tensors.emplace_back(checkpoint::rank_path(0, kClientOptimizer), serialized(*impl.client_optimizer));
  }
  return tensors;
}

std::string buffer_for(const checkpoint::Source& source, int rank, bool same_ranks, const std::string& name) {
  const std::string common = checkpoint::buffer_path(name);
  const std::string own = checkpoint::rank_path(rank, common);
  if (same_ranks && source.contains(own)) return own;
  if (source.contains(common)) return common;
  return source.contains(checkpoint::weight_path(name)) ? checkpoint::weight_path(name) : std::string();
}

void load_generators(const Engine::Impl& impl, checkpoint::Source& source, bool same_ranks) {
  if (!same_ranks) return;
  const int rank = impl.world->rank();
  const std::string host = checkpoint::rank_path(rank, kHostGenerator);
  if (source.contains(host)) set_generator_state(at::detail::getDefaultCPUGenerator(), source.tensor(host));
  const std::string device = checkpoint::rank_path(rank, kDeviceGenerator);
  if (!impl.device.is_cpu() && source.contains(device)) {
    set_generator_state(at::globalContext().defaultGenerator(impl.device), source.tensor(device));
  }
}

void require_client_optimizer(const Engine::Impl& impl, const checkpoint::Source& source) {
  const std::string path = checkpoint::rank_path(0, kClientOptimizer);
  require(source.contains(path), source.location(), ": load_checkpoint: the engine has a client optimizer, the ",
          "checkpoint has no state of one; pass load_optimizer_states = false to begin with a fresh one");
  const checkpoint::OptimizerState own = client_optimizer_state(*impl.client_optimizer);
  const checkpoint::OptimizerState saved = source.state().optimizer.value_or(checkpoint::OptimizerState());
  require(saved.type == own.type && saved.groups.size() == own.groups.size(), source.location(),
          ": load_checkpoint: expected the state of a client optimizer ", own.type, " with ", own.groups.size(),
          " parameter groups, found ", saved.type, " with ", saved.groups.size(),
          "; pass load_optimizer_states = false to begin with a fresh one");
}

void load_client_optimizer(const Engine::Impl& impl, checkpoint::Source& source) {
  take_serialized(impl, source.tensor(checkpoint::rank_path(0, kClientOptimizer)));
}

}  // namespace ds::engine
