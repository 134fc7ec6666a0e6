#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/init_distributed.h"
#include "layers/batch_norm/converted_layers.h"
#include "loops/replicated_model_impl.h"
#include "model/state/same_on_all_ranks.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {
namespace {

struct BucketCaps {
  int64_t first_bytes = 0;  // the cap of the bucket that is reduced first
  int64_t bytes = 0;        // the cap of the others
};

// Some of the parameters, by their numbers, in ascending order.
using Numbers = std::vector<size_t>;

// Parameters of one device and dtype.
std::vector<Numbers> alike(const std::vector<zero::Parameter>& parameters) {
  std::vector<Numbers> result;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    const auto same = std::find_if(result.begin(), result.end(), [&](const Numbers& numbers) {
      const at::Tensor& other = parameters[numbers.front()].tensor;
      return other.device() == tensor.device() && other.scalar_type() == tensor.scalar_type();
    });
    if (same == result.end()) {
      result.push_back({i});
    } else {
      same->push_back(i);
    }
  }
  return result;
}

// The first of the last parameters that are at most `bytes` together, one at least.
size_t begin_of_first_bucket(const std::vector<zero::Parameter>& parameters, const Numbers& numbers, int64_t bytes) {
  size_t begin = numbers.size();
  int64_t total = 0;
  while (begin > 0) {
    total += static_cast<int64_t>(parameters[numbers[begin - 1]].tensor.nbytes());
    if (total > bytes && begin < numbers.size()) break;
    --begin;
  }
  return begin;
}

void lay_out_some(const std::vector<zero::Parameter>& parameters, const Numbers& numbers, int64_t cap, int ranks,
                  std::vector<zero::BucketLayout>& result) {
  if (numbers.empty()) return;
  std::vector<zero::LayoutParameter> shapes;
  for (const size_t number : numbers) shapes.push_back({parameters[number].name, parameters[number].tensor.numel()});
  const int64_t element = parameters[numbers.front()].tensor.element_size();
  const int64_t elements = std::max<int64_t>(1, cap / element);
  for (zero::BucketLayout& bucket : zero::lay_out(
           shapes, {.world_size = ranks, .max_bucket_elements = elements, .target_bucket_elements = elements})) {
    for (Segment& segment : bucket.segments) {
      segment.parameter = static_cast<int64_t>(numbers[static_cast<size_t>(segment.parameter)]);
    }
    result.push_back(std::move(bucket));
  }
}

// Lays the gradients of a module that stays as it is into buckets, by the rules of torch's DistributedDataParallel:
// parameters of one device and dtype together, cut at module boundaries. Buckets come in the order of their first
// parameters and are reduced from the last to the first: the last parameters of the model, whose gradients come first,
// have the small one. A parameter larger than its cap has a bucket of its own. `ranks`: the number of ranks that share
// them.
std::vector<zero::BucketLayout> lay_out_gradients(const std::vector<zero::Parameter>& parameters,
                                                  const BucketCaps& caps, int ranks) {
  std::vector<zero::BucketLayout> result;
  for (const Numbers& numbers : alike(parameters)) {
    const auto begin = static_cast<std::ptrdiff_t>(begin_of_first_bucket(parameters, numbers, caps.first_bytes));
    lay_out_some(parameters, {numbers.begin(), numbers.begin() + begin}, caps.bytes, ranks, result);
    lay_out_some(parameters, {numbers.begin() + begin, numbers.end()}, caps.first_bytes, ranks, result);
  }
  std::sort(result.begin(), result.end(), [](const zero::BucketLayout& a, const zero::BucketLayout& b) {
    return a.segments.front().parameter < b.segments.front().parameter;
  });
  return result;
}

constexpr double kMiB = 1024.0 * 1024.0;
constexpr const char* kBetweenPasses = "the program (data, forward)";

std::shared_ptr<torch::nn::Module> given_module(std::shared_ptr<torch::nn::Module> module) {
  require(module != nullptr, "DistributedDataParallel: expected a module, found null");
  return module;
}

std::shared_ptr<comm::Communicator> group_for(const DistributedDataParallelOptions& options, at::Device device) {
  if (options.process_group) return options.process_group;
  return engine::init_distributed({.device = device.str()}).ranks;
}

int64_t bytes_of(const char* option, double mebibytes) {
  require(mebibytes > 0, "DistributedDataParallel: .", option, ": expected a number above 0, found ", mebibytes);
  return std::max<int64_t>(1, static_cast<int64_t>(mebibytes * kMiB));
}

UnusedRule rule_of(const DistributedDataParallelOptions& options) {
  if (options.static_graph) return UnusedRule::kTheSame;
  return options.find_unused_parameters ? UnusedRule::kAny : UnusedRule::kNone;
}

std::vector<const void*> identities_of(const torch::nn::Module& module) {
  std::vector<const void*> result;
  for (const at::Tensor& parameter : module.parameters()) result.push_back(parameter.unsafeGetTensorImpl());
  return result;
}

std::vector<at::TensorOptions> kinds_of(const std::vector<zero::Parameter>& parameters) {
  std::vector<at::TensorOptions> result;
  for (const zero::Parameter& one : parameters) result.push_back(one.tensor.options());
  return result;
}

std::vector<zero::Parameter> all_tensors(const engine::ModelParameters& parameters) {
  std::vector<zero::Parameter> all = parameters.trainable;
  all.insert(all.end(), parameters.frozen.begin(), parameters.frozen.end());
  all.insert(all.end(), parameters.buffers.begin(), parameters.buffers.end());
  return all;
}

// The settings for the comparison of ranks, as lines "what<TAB>value".
std::string settings_of(const DistributedDataParallelOptions& options, const engine::ModelParameters& parameters,
                        torch::nn::Module& module) {
  std::string text =
      cat(".bucket_cap_mb\t", options.bucket_cap_mb, "\n.first_bucket_mb\t", options.first_bucket_mb,
          "\n.broadcast_buffers\t", options.broadcast_buffers, "\n.find_unused_parameters\t",
          options.find_unused_parameters, "\n.static_graph\t", options.static_graph,
          "\nlayers of convert_sync_batchnorm without a group\t", norm::layers_without_ranks(module).size(), '\n');
  for (const zero::Parameter& buffer : parameters.buffers) {
    text += cat("buffer ", buffer.name, '\t', buffer.tensor.scalar_type(), ' ', buffer.tensor.sizes(), '\n');
  }
  text += text_of(renormed_tables(module, parameters.trainable));
  return text;
}

}  // namespace

ReplicatedModel::Impl::Impl(std::shared_ptr<torch::nn::Module> model, const DistributedDataParallelOptions& given)
    : module(given_module(std::move(model))),
      options(given),
      parameters(engine::collect_parameters(*module)),
      identities(identities_of(*module)),
      kinds(kinds_of(parameters.trainable)),
      group(group_for(options, parameters.trainable.front().tensor.device())),
      used(parameters.trainable, rule_of(options), parameters.trainable.front().tensor.device()),
      pass({.begin = [this] { begin_backward(); },
            .end = [this] { end_backward(); },
            .abandon =
                [this] {
                  reducer->abandon_backward();
                  group->note_phase(kBetweenPasses, reductions + 1);
                }}) {
  const BucketCaps caps{.first_bytes = bytes_of("first_bucket_mb", options.first_bucket_mb),
                        .bytes = bytes_of("bucket_cap_mb", options.bucket_cap_mb)};
  require_device();
  require_same_on_all_ranks();
  for (zero::BucketLayout& layout : lay_out_gradients(parameters.trainable, caps, group->size())) {
    buckets.emplace_back(std::move(layout), parameters.trainable);
  }
  take_values(all_tensors(parameters), 0, "values");
  if (group->size() > 1) renormed = renormed_tables(*module, parameters.trainable);
  norms = norm::give_ranks(norm::layers_without_ranks(*module), *group);
  make_reducer();
}

void ReplicatedModel::Impl::require_device() const {
  if (options.device_ids.empty()) return;
  require(options.device_ids.size() == 1, "DistributedDataParallel: .device_ids: expected one device, found ",
          options.device_ids.size(), "; a module whose parts are on several is given without device_ids");
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(options.device_ids.front()));
  for (const zero::Parameter& one : all_tensors(parameters)) {
    require(one.tensor.device() == device, "DistributedDataParallel: .device_ids: expected the module on ", device,
            ", found ", one.name, ", ", describe(one.tensor), "; call model->to(torch::Device(\"", device,
            "\")) before the wrapper is made, or leave .device_ids empty");
  }
}

void ReplicatedModel::Impl::require_same_on_all_ranks() const {
  engine::require_same_on_all_ranks(parameters, settings_of(options, parameters, *module),
                                    {.call = "DistributedDataParallel"}, parameters.trainable.front().tensor.device(),
                                    *group);
}

void ReplicatedModel::Impl::make_reducer() {
  reducer.reset();  // its hooks make room
  reducer = std::make_unique<zero::GradientReducer>(
      buckets, parameters.trainable, zero::ReduceRoutes{.slices = *group, .reduction = hooked.reduction.get()},
      zero::ReducerOptions{.policy = zero::ReductionPolicy::kAllReduce,
                           .prescale = hooked.prescale,
                           .gradient_dtype = at::ScalarType::Undefined,
                           .communication_dtype = hooked.wire,
                           .model = module->name(),
                           .plain_passes = true,
                           .gradients_are_views = options.gradient_as_bucket_view});
  reducer->enter_with([this] { pass.enter(); });
}

void ReplicatedModel::Impl::require_same_module() const {
  constexpr const char* kMakeAgain = "; make the wrapper again after the module has changed";
  require(
      identities_of(*module) == identities, "backward(): expected the parameters that ", module->name(),
      " had when its DistributedDataParallel was made, found others: some were added, removed or replaced by other ",
      "tensors", kMakeAgain);
  for (size_t i = 0; i < kinds.size(); ++i) {
    const zero::Parameter& parameter = parameters.trainable[i];
    require(parameter.tensor.dtype() == kinds[i].dtype() && parameter.tensor.device() == kinds[i].device(),
            "backward(): parameter ", parameter.name, ": expected ", kinds[i].dtype().name(), " on ", kinds[i].device(),
            ", as it was when DistributedDataParallel was made, found ", describe(parameter.tensor), kMakeAgain);
  }
  for (const zero::Parameter& frozen : parameters.frozen) {
    require(!frozen.tensor.requires_grad(), "backward(): parameter ", frozen.name, " requires a gradient, and did not ",
            "when DistributedDataParallel was made: expected it frozen, for nobody reduces its gradient", kMakeAgain);
  }
}

void ReplicatedModel::Impl::begin_backward() {
  require_same_module();
  used.require_all_used("backward()");
  ++passes;
  reduces = no_sync_scopes == 0;
  group->note_phase("backward", reductions + 1);
  if (reduces) {
    if (joining) agree_on_passes(/*own=*/true);
    if (hooked.reduction) hooked.reduction->begin_pass(reductions, /*scale=*/1.0);
    if (used.is_first_of_many() || (options.static_graph && reducer->any_repeated())) reducer->reduce_after_next_pass();
  }
  reducer->begin_backward(/*synchronize=*/reduces, /*boundary=*/true);
}

void ReplicatedModel::Impl::end_backward() {
  std::vector<char> own(parameters.trainable.size(), 1);
  for (const int64_t number : reducer->parameters_without_gradient()) own[static_cast<size_t>(number)] = 0;
  reducer->end_backward();
  if (reduces) {
    show_gradients(used.agree(std::move(own), *group));
    ++reductions;
    const bool by_forward = std::exchange(called_forward, false) && !joining;
    if (options.broadcast_buffers && !by_forward) follow_buffers(joining ? last_rank_with_pass() : 0);
  }
  group->note_phase(kBetweenPasses, reductions + 1);
}

void ReplicatedModel::Impl::show_gradients(const std::vector<char>& any_used) {
  reducer->finish();
  double factor = 1.0;
  if (joining && !join_options.divide_by_initial_world_size) {
    int64_t ranks = 0;
    for (const int64_t has : with_pass) ranks += has;
    factor = static_cast<double>(group->size()) / static_cast<double>(ranks);
  }
  reducer->show_gradients(any_used, factor);
  share_rows();
}

void ReplicatedModel::Impl::share_rows(bool has_pass) {
  for (const RenormedTable& table : renormed) share_shortened_rows(table, *group, has_pass);
}

void ReplicatedModel::Impl::take_values(const std::vector<zero::Parameter>& of, int root, const char* what) {
  std::vector<at::Tensor> tensors;
  for (const zero::Parameter& one : of) tensors.push_back(one.tensor);
  comm::broadcast_values(tensors, root, *group, what);
}

void ReplicatedModel::Impl::follow_buffers(int root) { take_values(parameters.buffers, root, "buffers"); }

ReplicatedModel::ReplicatedModel(std::shared_ptr<torch::nn::Module> module,
                                 const DistributedDataParallelOptions& options)
    : impl_(std::make_unique<Impl>(std::move(module), options)) {}

ReplicatedModel::~ReplicatedModel() {
  if (impl_->process.is_this()) return;
  [[maybe_unused]] const Impl* const stays = impl_.release();  // Note [Forked children]
}

void ReplicatedModel::before_forward() {
  impl_->used.require_all_used("forward()");
  if (!impl_->options.broadcast_buffers || impl_->no_sync_scopes > 0 || impl_->joining) return;
  impl_->called_forward = true;
  impl_->follow_buffers(0);
}

void ReplicatedModel::begin_no_sync() { ++impl_->no_sync_scopes; }

void ReplicatedModel::end_no_sync() { --impl_->no_sync_scopes; }

void ReplicatedModel::register_comm_hook(const CommHook& hook) {
  require(!impl_->has_hook, "register_comm_hook: expected one call of it, found a second one");
  require(impl_->passes == 0, "register_comm_hook: expected it before the first backward(), found ", impl_->passes,
          " that were");
  impl_->hooked = make_hooked_reduction(hook, impl_->group, impl_->buckets, impl_->parameters.infos);
  impl_->has_hook = true;
  impl_->make_reducer();
}

}  // namespace ds::loops
