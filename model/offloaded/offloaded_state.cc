#include "model/offloaded/offloaded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/numbers/block_codec.h"
#include "core/round_up.h"
#include "core/without_stack.h"
#include "model/agreement/host_room.h"
#include "offload/file_slices.h"
#include "offload/pinned_arena.h"

namespace ds::engine {
namespace {

using offload::PinnedArena;

constexpr const char* kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";
constexpr const char* kParameterPath = "zero_optimization.offload_param.nvme_path";

int64_t arena_bytes(int64_t numel, at::ScalarType dtype) {
  return static_cast<int64_t>(PinnedArena::bytes_of(numel, dtype));
}

std::vector<int64_t> elements_of(const std::vector<zero::BucketLayout>& buckets) {
  std::vector<int64_t> elements;
  for (const zero::BucketLayout& bucket : buckets) elements.push_back(bucket.numel);
  return elements;
}

// Slices of parameters in the order in which buckets are built.
std::vector<zero::StoredSlice> parameter_slices_of(const Plan& plan, const OffloadedLayout& layout) {
  const auto element_bytes = static_cast<int64_t>(at::elementSize(layout.parameter_dtype));
  std::vector<zero::StoredSlice> slices;
  for (const zero::BucketLayout& bucket : layout.buckets) {
    if (!bucket.persistent) slices.push_back({bucket.slice_numel, bucket.slice_numel * element_bytes});
  }
  for (const zero::BucketLayout& bucket : layout.frozen) {
    if (bucket.persistent) continue;
    if (plan.frozen_bits == 0) {
      slices.push_back({bucket.slice_numel, bucket.slice_numel * element_bytes});
    } else {
      const int64_t bytes = BlockCodec(plan.frozen_bits).encoded_bytes(bucket.slice_numel);
      slices.push_back({bytes, bytes});
    }
  }
  return slices;
}

int64_t longest_slice(const OffloadedLayout& layout, const std::vector<char>& updates) {
  int64_t longest = 0;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    if (updates[b]) longest = std::max(longest, layout.buckets[b].slice_numel);
  }
  return longest;
}

// Bytes of the tensors of each slice that the optimizer has in a file: master, then states.
std::vector<std::vector<int64_t>> swapped_sizes(const OffloadedLayout& layout, const std::vector<char>& updates) {
  const auto master = static_cast<int64_t>(at::elementSize(layout.master_dtype));
  const auto state = static_cast<int64_t>(at::elementSize(layout.state_dtype));
  std::vector<std::vector<int64_t>> sizes;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    if (!updates[b]) continue;
    const int64_t numel = layout.buckets[b].slice_numel;
    sizes.emplace_back(layout.states[b], numel * state);
    sizes.back().insert(sizes.back().begin(), numel * master);
  }
  return sizes;
}

offload::AioOptions aio_options(const config::AioSection& section) {
  return {.block_size = section.block_size,
          .queue_depth = section.queue_depth,
          .intra_op_parallelism = section.intra_op_parallelism,
          .single_submit = section.single_submit,
          .overlap_events = section.overlap_events};
}

// Calls `action` on every rank; when it throws on one, all throw.
void on_all_ranks(comm::Communicator& world, at::Device device, const std::function<void()>& action) {
  std::exception_ptr failure;
  try {
    action();
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, device, world);
  require<ConfigError>(failed < 0, "zero_optimization.offload_optimizer, zero_optimization.offload_param: rank ",
                       failed, " could not take memory or files for what is offloaded; its message says why (this ",
                       "is rank ", world.rank(), ")");
}

// Returns the bytes of the buffers through which slices of at most `longest` elements travel from and to a device that
// is not the host.
int64_t travel_bytes(const OffloadedLayout& layout, int64_t longest) {
  return zero::kWriteBackBuffers * arena_bytes(longest, layout.parameter_dtype) +
         zero::kArrivals * arena_bytes(longest, layout.gradient_dtype);
}

// In an arena, of one slice: its master, and all its states.
int64_t master_bytes(const OffloadedLayout& layout, size_t bucket) {
  return arena_bytes(layout.buckets[bucket].slice_numel, layout.master_dtype);
}
int64_t state_bytes(const OffloadedLayout& layout, size_t bucket) {
  return arena_bytes(layout.buckets[bucket].slice_numel, layout.state_dtype) * layout.states[bucket];
}

std::string file_name(const char* what, int rank) { return cat("dsengine-", what, "-rank", rank); }

}  // namespace

// Counts and takes the memory and the files of an OffloadedState.
class OffloadedState::Setup {
 public:
  // All arguments outlive it.
  Setup(OffloadedState& state, const Plan& plan, const config::DsConfig& config, const OffloadedLayout& layout)
      : state_(state), plan_(plan), config_(config), layout_(layout), longest_(longest_slice(layout, state.updates_)) {}

  // Fills in how many bytes will be taken.
  void count_bytes();
  // Takes them. Throws ConfigError or IoError.
  void take_memory();

 private:
  void keep_parameters();
  void read_on_device(offload::FileSlices& slices, int64_t bytes, int64_t count) const;
  void swap_optimizer();
  void keep_gradients();
  void prepare_delay();
  void prepare_speculation();
  std::vector<at::Tensor> slices_of(const char* purpose, at::ScalarType dtype, bool pin) const;
  std::shared_ptr<PinnedArena> arena(const char* purpose, int64_t bytes, bool pin) const;

  OffloadedState& state_;
  const Plan& plan_;
  const config::DsConfig& config_;
  const OffloadedLayout& layout_;
  int64_t longest_;  // elements of the longest slice that is updated on the host
};

void OffloadedState::Setup::count_bytes() {
  const zero::Offload& offload = plan_.offload;
  state_.shares_master_ =
      zero::shares_master(offload, /*separate_master=*/layout_.parameter_dtype != layout_.master_dtype);
  if (offload.parameters != zero::Home::kDevice) {
    state_.bytes_ = zero::place_parameters(parameter_slices_of(plan_, layout_), offload);
  }
  const bool in_file = offload.optimizer == zero::Home::kFile;
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    if (!state_.updates_[b]) continue;
    const zero::BucketLayout& bucket = layout_.buckets[b];
    state_.bytes_.host.gradients += arena_bytes(bucket.slice_numel, layout_.gradient_dtype) * (offload.delayed ? 2 : 1);
    if (offload.delayed || offload.speculative)
      state_.bytes_.staging += arena_bytes(bucket.slice_numel, layout_.parameter_dtype);
    if (in_file) continue;
    if (!state_.shares_master_ || bucket.persistent) state_.bytes_.host.master += master_bytes(layout_, b);
    state_.bytes_.host.optimizer += state_bytes(layout_, b);
    if (offload.speculative) state_.bytes_.staging += master_bytes(layout_, b) + state_bytes(layout_, b);
  }
  if (offload.speculation_copies_gradient) state_.bytes_.staging += arena_bytes(longest_, layout_.gradient_dtype);
  if (in_file) {
    const auto sizes = offload::SliceSwapper::sizes(swapped_sizes(layout_, state_.updates_), offload.optimizer_buffers);
    state_.bytes_.file += sizes.file_bytes;
    state_.bytes_.staging += sizes.buffer_bytes;
  }
  if (!state_.device_.is_cpu()) state_.bytes_.staging += travel_bytes(layout_, longest_);
}

void OffloadedState::Setup::take_memory() {
  const zero::Offload& offload = plan_.offload;
  if (offload.parameters != zero::Home::kDevice) keep_parameters();
  if (longest_ == 0) return;
  if (offload.optimizer == zero::Home::kFile) {
    swap_optimizer();
  } else {
    // Never copied to a device.
    state_.optimizer_ =
        arena("master weights and optimizer states", state_.bytes_.host.master + state_.bytes_.host.optimizer, false);
  }
  keep_gradients();
  if (offload.delayed) prepare_delay();
  if (offload.speculative) prepare_speculation();
}

std::shared_ptr<PinnedArena> OffloadedState::Setup::arena(const char* purpose, int64_t bytes, bool pin) const {
  return std::make_shared<PinnedArena>(purpose, static_cast<size_t>(bytes),
                                       offload::ArenaOptions{.pin = pin, .device = state_.device_});
}

void OffloadedState::Setup::keep_parameters() {
  const config::OffloadParamSection& section = *config_.zero_optimization.offload_param;
  const std::vector<zero::StoredSlice> slices = parameter_slices_of(plan_, layout_);
  const size_t kept_slices = zero::kept_slices(slices, plan_.offload);
  std::shared_ptr<PinnedArena> kept;
  if (state_.bytes_.host.parameters > 0)
    kept = arena("parameter slices", state_.bytes_.host.parameters, section.pin_memory);
  if (kept_slices == slices.size()) {
    if (kept) state_.parameter_slices_ = std::make_shared<offload::ArenaSlices>(std::move(kept));
    if (config_.aio.use_gds && plan_.offload.parameters == zero::Home::kFile && layout_.rank == 0) {
      log::warning("aio.use_gds: nothing to read from a file: zero_optimization.offload_param.max_in_cpu: ",
                   plan_.offload.kept_parameters,
                   " keeps all slices in host memory. Set max_in_cpu to 0, or use_gds to ", "false");
    }
    return;
  }
  std::vector<int64_t> sizes;
  for (size_t i = kept_slices; i < slices.size(); ++i) sizes.push_back(slices[i].bytes);
  const int64_t buffer = offload::FileSlices::buffer_bytes(sizes);
  const auto buffers_arena =
      arena("buffers of parameter slices", buffer * plan_.offload.parameter_buffers, section.pin_memory);
  std::vector<at::Tensor> buffers;
  for (int64_t i = 0; i < plan_.offload.parameter_buffers; ++i)
    buffers.push_back(buffers_arena->take(buffer, at::kByte));
  auto file = std::make_unique<offload::AioFile>(*section.nvme_path, file_name("parameters", layout_.rank),
                                                 offload::FileSlices::file_bytes(sizes), aio_options(config_.aio),
                                                 kParameterPath);
  const auto in_file = std::make_shared<offload::FileSlices>(std::move(file), sizes, std::move(buffers),
                                                             std::move(kept), kept_slices, state_.device_);
  if (config_.aio.use_gds) read_on_device(*in_file, buffer, plan_.offload.parameter_buffers);
  state_.parameter_slices_ = in_file;
}

void OffloadedState::Setup::read_on_device(offload::FileSlices& slices, int64_t bytes, int64_t count) const {
  require<ConfigError>(!state_.device_.is_cpu(),
                       "aio.use_gds: expected a GPU into whose memory files are read, found the CPU; ", "use false");
  constexpr int64_t kAlignment = offload::AioFile::alignment();
  at::Tensor memory;
  try {
    memory = at::empty({bytes * count + kAlignment}, at::TensorOptions().dtype(at::kByte).device(state_.device_));
  } catch (const c10::OutOfMemoryError& error) {
    throw ConfigError(cat("aio.use_gds: expected room on ", state_.device_,
                          " for zero_optimization.offload_param.buffer_count: ", count, " slices of ",
                          offload::size_text(bytes), ", found: ", error.what_without_backtrace(),
                          ". Lower buffer_count, or set use_gds to false"));
  }
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data_ptr()));
  const int64_t first = round_up(address, kAlignment) - address;
  std::vector<at::Tensor> buffers;
  for (int64_t i = 0; i < count; ++i) buffers.push_back(memory.narrow(0, first + i * bytes, bytes));
  slices.gather_on_device(std::move(buffers));
  log::info("device memory: ", offload::size_text(bytes * count),
            " for parameter slices that are read from their file into ", "it (aio.use_gds)");
}

void OffloadedState::Setup::swap_optimizer() {
  const config::OffloadOptimizerSection& section = *config_.zero_optimization.offload_optimizer;
  const int64_t count = plan_.offload.optimizer_buffers;
  const auto sizes = offload::SliceSwapper::sizes(swapped_sizes(layout_, state_.updates_), count);
  auto file = std::make_unique<offload::AioFile>(*section.nvme_path, file_name("optimizer", layout_.rank),
                                                 sizes.file_bytes, aio_options(config_.aio), kOptimizerPath);
  const at::Tensor buffers =
      arena("buffers of optimizer states", sizes.buffer_bytes, false)->take(sizes.buffer_bytes, at::kByte);
  state_.swapper_ = std::make_unique<offload::SliceSwapper>(std::move(file), buffers, count);
  state_.pass_ = {.read_ahead = section.pipeline_read, .write_behind = section.pipeline_write};
}

void OffloadedState::Setup::keep_gradients() {
  const bool pin = config_.zero_optimization.offload_optimizer->pin_memory;
  std::vector<at::Tensor> slices = slices_of("gradients", layout_.gradient_dtype, pin);
  std::vector<at::Tensor> arrivals;
  std::vector<at::Tensor> buffers;
  if (!state_.device_.is_cpu()) {
    const auto staged = arena("what is on its way from and to the device", travel_bytes(layout_, longest_), pin);
    for (int i = 0; i < zero::kArrivals; ++i) arrivals.push_back(staged->take(longest_, layout_.gradient_dtype));
    for (int i = 0; i < zero::kWriteBackBuffers; ++i)
      buffers.push_back(staged->take(longest_, layout_.parameter_dtype));
    state_.write_back_ = std::make_unique<offload::WriteBack>(state_.device_, std::move(buffers));
  }
  state_.gradients_ = std::make_unique<offload::HostGradients>(std::move(slices), state_.device_, std::move(arrivals));
}

// An arena with a tensor for each bucket that is updated here.
std::vector<at::Tensor> OffloadedState::Setup::slices_of(const char* purpose, at::ScalarType dtype, bool pin) const {
  int64_t bytes = 0;
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    if (state_.updates_[b]) bytes += arena_bytes(layout_.buckets[b].slice_numel, dtype);
  }
  const auto memory = arena(purpose, bytes, pin);
  std::vector<at::Tensor> slices(layout_.buckets.size());
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    if (state_.updates_[b]) slices[b] = memory->take(layout_.buckets[b].slice_numel, dtype);
  }
  return slices;
}

void OffloadedState::Setup::prepare_delay() {
  const bool pin = config_.zero_optimization.offload_optimizer->pin_memory;
  state_.other_gradients_ = slices_of("gradients of a delayed update", layout_.gradient_dtype, pin);
  state_.weights_ = slices_of("weights of a delayed update", layout_.parameter_dtype, pin);
}

void OffloadedState::Setup::prepare_speculation() {
  const bool pin = config_.zero_optimization.offload_optimizer->pin_memory;
  int64_t bytes = 0;
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    if (state_.updates_[b]) bytes += master_bytes(layout_, b) + state_bytes(layout_, b);
  }
  const auto before = arena("master weights and optimizer states before a speculative update", bytes, false);
  SpeculationMemory memory = {.undo = std::vector<std::vector<at::Tensor>>(layout_.buckets.size()),
                              .weights = slices_of("weights of a speculative update", layout_.parameter_dtype, pin),
                              .gradient = {}};
  for (size_t b = 0; b < layout_.buckets.size(); ++b) {
    if (!state_.updates_[b]) continue;
    const int64_t numel = layout_.buckets[b].slice_numel;
    memory.undo[b].push_back(before->take(numel, layout_.master_dtype));
    for (int64_t i = 0; i < layout_.states[b]; ++i) memory.undo[b].push_back(before->take(numel, layout_.state_dtype));
  }
  if (plan_.offload.speculation_copies_gradient) {
    memory.gradient = arena("a gradient of a speculative update", arena_bytes(longest_, layout_.gradient_dtype), false)
                          ->take(longest_, layout_.gradient_dtype);
  }
  state_.speculation_ = std::make_unique<SpeculativeUpdate>(*state_.gradients_, std::move(memory));
}

OffloadedState::OffloadedState(const Plan& plan, const config::DsConfig& config, const OffloadedLayout& layout,
                               comm::Communicator& world)
    : device_(layout.device),
      updates_(zero::offloaded_buckets(elements_of(layout.buckets), plan.offload)),
      states_(layout.states),
      master_dtype_(layout.master_dtype),
      state_dtype_(layout.state_dtype),
      swapped_(layout.buckets.size(), -1),
      fresh_(layout.buckets.size()) {
  Setup setup(*this, plan, config, layout);
  setup.count_bytes();
  require_room_on_hosts(bytes_.host_total(),
                        "model state (zero_optimization.offload_optimizer, zero_optimization.offload_param)", device_,
                        world);
  on_all_ranks(world, device_, [&] { setup.take_memory(); });
}

ReducedGradients* OffloadedState::gradients() {
  if (speculation_) return speculation_.get();
  return gradients_.get();
}

at::Tensor OffloadedState::master_of(size_t bucket, const at::Tensor& values, bool sharded) {
  if (shares_master_ && sharded) return {};
  const at::NoGradGuard no_grad;
  if (!swapper_) return optimizer_->take(values.numel(), master_dtype_).copy_(values);
  const at::Tensor master = values.to(at::kCPU, master_dtype_, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t i = 0; i < states_[bucket]; ++i) {
    fresh_[bucket].push_back(offload::tensor_without_memory(values.numel(), state_dtype_));
  }
  std::vector<at::Tensor> tensors = {master};
  tensors.insert(tensors.end(), fresh_[bucket].begin(), fresh_[bucket].end());
  swapped_[bucket] = swapper_->add(std::move(tensors));
  return master;
}

optimizers::StateMemory OffloadedState::state_memory() {
  return [this](int64_t index, int64_t numel, at::ScalarType dtype) {
    const auto bucket = static_cast<size_t>(index);
    if (!updates(bucket)) return at::Tensor();
    if (!swapper_) return optimizer_->take(numel, dtype);
    ensure(!fresh_[bucket].empty(), "an optimizer has as many states as were foreseen");
    at::Tensor state = std::move(fresh_[bucket].front());
    fresh_[bucket].erase(fresh_[bucket].begin());
    return state;
  };
}

void OffloadedState::use(size_t bucket, bool changes, const std::function<void()>& use) {
  if (speculation_) speculation_->roll_back();
  if (!swapper_ || !updates(bucket)) return use();
  swapper_->with(swapped_[bucket], changes, [&](int64_t) { use(); });
}

void OffloadedState::for_each(const std::function<void(size_t bucket)>& update) {
  std::vector<int64_t> order;
  std::vector<size_t> bucket_of;
  for (size_t b = 0; b < updates_.size(); ++b) {
    if (!updates_[b]) continue;
    if (!swapper_) {
      update(b);
      continue;
    }
    order.push_back(swapped_[b]);
    bucket_of.push_back(b);  // slices were added in this order
  }
  if (swapper_)
    swapper_->for_each(
        order, [&](int64_t slice) { update(bucket_of[static_cast<size_t>(slice)]); }, pass_);
}

void OffloadedState::update(optimizers::SliceOptimizer& optimizer, size_t bucket, const at::Tensor& gradient,
                            double gradient_scale, const at::Tensor& own) {
  const auto index = static_cast<int64_t>(bucket);
  if (own.is_cpu()) return optimizer.update_into(index, gradient, gradient_scale, own);
  write_back_->send(own,
                    [&](const at::Tensor& buffer) { optimizer.update_into(index, gradient, gradient_scale, buffer); });
}

void OffloadedState::start_update(optimizers::SliceOptimizer& optimizer, double gradient_scale,
                                  const std::function<void(const at::Tensor& gradient)>& prepare) {
  ensure(!update_runs(), "one delayed update runs at a time");
  taken_ = gradients_->exchange(std::move(other_gradients_));
  running_ = worker_.push([this, &optimizer, gradient_scale, prepare] {
    const at::NoGradGuard no_grad;
    for_each([&](size_t bucket) {
      prepare(taken_[bucket]);
      optimizer.update_into(static_cast<int64_t>(bucket), taken_[bucket], gradient_scale, weights_[bucket]);
    });
  });
}

void OffloadedState::abandon_update() noexcept {
  if (!running_) return;
  try {
    running_->wait();
    log::warning("the parameters of the model lack the last update, which was delayed; call ",
                 "engine->synchronize_parameters() before the engine ends");
  } catch (const std::exception& error) {
    log::warning("the last delayed update failed: ", without_stack(error.what()));
  }
  running_.reset();
}

void OffloadedState::finish_update(const std::function<void(size_t bucket, const at::Tensor& weights)>& publish) {
  const auto running = std::exchange(running_, nullptr);
  std::exception_ptr failure;
  try {
    running->wait();
  } catch (...) {
    failure = std::current_exception();
  }
  other_gradients_ = std::move(taken_);
  if (failure) std::rethrow_exception(failure);
  for (size_t b = 0; b < updates_.size(); ++b) {
    if (updates_[b]) publish(b, weights_[b]);
  }
}

}  // namespace ds::engine
