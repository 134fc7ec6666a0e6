#include "loops/sharded_model.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "comm/slice_group.h"
#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"
#include "layers/batch_norm/converted_layers.h"
#include "loops/first_values.h"
#include "loops/shard_ranks.h"
#include "model/state/finished_gradients.h"
#include "model/state/parameter_memory.h"
#include "model/state/part_options.h"
#include "model/state/same_on_all_ranks.h"
#include "model/state/start_values.h"

namespace ds::loops {
namespace {

constexpr const char* kReleased =
    "parameter {} is not in memory: fully_shard has given this rank a slice of it, and the whole only while operators "
    "read it. Optimizers, also those made before, have to be made over sharded->parameters(); torch::save(), "
    "data_ptr() "
    "and accessors see it whole between sharded->unshard() and reshard(), or take sharded->full_state_dict()";

constexpr const char* kEnded =
    "the end of its fully_shard: ranks had slices of it, which have gone with it. Take sharded->full_state_dict() "
    "before, "
    "and keep what fully_shard() returned as long as the module is used";

bool any_trained(const torch::nn::Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& one) { return one.requires_grad(); });
}

// Moves the parameters and buffers that have memory to `device`.
void move_to(c10::Device device, const torch::nn::Module& module, const EarlierUnits& earlier) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() == device || tensor.is_meta() || earlier.have(tensor)) continue;
    tensor.set_data(tensor.detach().to(device));
  }
}

// Throws UsageError where the module has other values of its parameters, or trains other parameters: slices are what
// trains, so that these would go unseen.
void require_same_parameters(const engine::ModelState& state) {
  if (state.tensor) {
    state.tensor->require_leaves("backward()");
    state.tensor->follow_flags();
  }
  const auto look = [](const zero::ParameterBucket& bucket) {
    for (size_t i = 0; i < bucket.parameters().size(); ++i) {
      require(bucket.storage().is_here(i), "backward(): parameter ", bucket.parameters()[i].name,
              ": expected it where ",
              "fully_shard has put it, found other memory or another dtype (torch::load, set_data, to()), which the ",
              "slices know nothing of. Load or convert the module before fully_shard, or load with ",
              "sharded->load_full_state_dict() or sharded->load() in place of that");
    }
  };
  for (const zero::ParameterBucket& bucket : state.buckets) look(bucket);
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) look(bucket);
  for (const zero::Parameter& frozen : state.frozen) {
    require(!frozen.tensor.requires_grad(), "backward(): parameter ", frozen.name, " requires a gradient, and did not ",
            "when fully_shard was called: expected it frozen, for it has no slice that an optimizer could train. Call ",
            "set_requires_grad(true) before fully_shard");
  }
}

// Adds the partial sums of summed buckets over the tensor axis: of full parameters between parts of sequences, each of
// its ranks has a part of the gradient.
void add_up_summed(const engine::ModelState& state, SliceGradients& gradients, const ShardRanks& ranks) {
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const at::Tensor gradient = gradients.gradient(b);
    if (!state.is_summed(b) || !gradient.defined()) continue;
    engine::add_up(gradient, *ranks.tensor, ranks.device, cat("summed gradients of bucket ", b));
  }
}

}  // namespace

ShardedModel::ShardedModel(const std::shared_ptr<torch::nn::Module>& module, const FullyShardOptions& options,
                           const std::vector<LayoutUnit>& units, EarlierUnits& earlier)
    : options_(options), ranks_(ranks_of(*module, options)) {
  engine::require_own_memory(*module, "fully_shard", ranks_.world->rank() == 0,
                             [&](const at::Tensor& tensor) { return earlier.have(tensor); });
  move_to(ranks_.device, *module, earlier);
  state_.module = module;
  state_.ranks = engine_ranks(ranks_);
  state_.tensor = tensor_parts_of(*module, ranks_);
  const engine::ModelParameters parameters =
      engine::collect_parameters(*module, any_trained(*module), state_.tensor != nullptr);
  const std::string settings =
      cat(settings_text(options, units.size(), count_on_meta(*module)),
          "layers of convert_sync_batchnorm without a group\t", norm::layers_without_ranks(*module).size(), '\n');
  const engine::GivenInputs inputs{.call = "fully_shard"};
  if (state_.tensor) {
    engine::require_same_on_all_ranks({}, settings + split_text(*module), inputs, ranks_.device, *ranks_.world);
  }
  engine::require_same_on_all_ranks(parameters, settings + text_of(renormed_tables(*module, parameters.trainable)),
                                    inputs, ranks_.device, *ranks_.all);
  awaits_values_ = options.weights.empty() && (count_on_meta(*module) > 0 || earlier.await_values());
  lay_out(parameters, units, earlier);
  norms_ = norm::give_ranks(norm::layers_without_ranks(*module), *ranks_.all);
  watch_slices();
}

void ShardedModel::lay_out(const engine::ModelParameters& parameters, const std::vector<LayoutUnit>& units,
                           EarlierUnits& earlier) {
  state_.parameters = parameters.trainable;
  state_.infos = parameters.infos;
  state_.frozen = parameters.frozen;
  const ShardLayout layout = shard_layout(parameters, units, options_, ranks_);
  state_.plan = layout.plan;
  engine::StartFiles files({.call = "fully_shard", .weights = options_.weights, .has_match = false});
  engine::StartValues values(*state_.module, files, options_.init, state_.ranks, [&](const zero::Parameter& tensor) {
    const at::Tensor known = earlier.value_of(tensor.tensor);
    return known.defined() ? known : no_values(tensor, ranks_.device);
  });
  const std::vector<int> one_group(parameters.trainable.size(), 0);
  engine::ModelLayout buckets = engine::lay_out(parameters, one_group, layout.buckets, ranks_.shards->size());
  const std::vector<int> part_of = buckets.part_of;
  engine::BucketedModel built =
      engine::build_buckets(parameters, std::move(buckets), layout.buckets, values, nullptr, *ranks_.shards);
  state_.buckets = std::move(built.buckets);
  state_.frozen_buckets = std::move(built.frozen_buckets);
  state_.masters = std::move(built.masters);
  state_.axes = engine::make_axes(state_);
  if (state_.tensor) state_.tensor->follow_leaves();
  if (options_.init) options_.init->end();  // the leaves are no parameters of the model
  options_.init = nullptr;
  make_parts(layout.reduce_dtype);
  for (size_t b = 0; b < part_of.size(); ++b) {
    gathers_->set_reshard_after_forward({b}, layout.reshards_after_forward[static_cast<size_t>(part_of[b])] != 0);
  }
  leaves_ = slice_leaves(state_);
  for (const SliceLeaf& leaf : leaves_) {
    comm::note_slice_group(leaf.tensor, ranks_.tensor ? ranks_.world : ranks_.shards);
  }
}

void ShardedModel::make_parts(at::ScalarType reduce_dtype) {
  const engine::RankGroups& groups = state_.ranks.groups;
  if (!state_.masters.empty()) gradients_.expect(state_.masters.size(), state_.masters.front().options());
  zero::ReducerOptions options;
  options.policy = zero::ReductionPolicy::kReduceScatterEveryBackward;
  options.gradient_dtype = options.communication_dtype = reduce_dtype;
  options.patience = engine::kReductionPatience;
  options.model = state_.module->name();
  options.plain_passes = true;
  state_.gradients.reducer = std::make_unique<zero::GradientReducer>(
      state_.buckets, state_.parameters,
      zero::ReduceRoutes{*groups.shards, groups.replicas.get(), nullptr, &gradients_}, options);
  std::vector<zero::ParameterBucket*> buckets;
  for (zero::ParameterBucket& bucket : state_.buckets) buckets.push_back(&bucket);
  for (zero::ParameterBucket& bucket : state_.frozen_buckets) buckets.push_back(&bucket);
  for (zero::ParameterBucket* bucket : buckets) bucket->storage().tell_when_released(kReleased);
  auto gatherer = std::make_unique<zero::ParameterGatherer>(buckets, zero::GatherRoutes{*groups.parameters},
                                                            *state_.plan.gather, kEnded);
  gathers_.emplace(*gatherer, buckets.size(), options_.backward_prefetch);
  state_.gatherer = gatherer.get();
  state_.access = std::move(gatherer);
}

void ShardedModel::watch_slices() {
  pass_ = std::make_unique<BackwardPass>(
      PassEvents{[this] { begin_pass(); }, [this] { end_pass(); }, [this] { abandon_pass(); }});
  state_.gradients.reducer->enter_with([this] { pass_->enter(); });
  for (size_t b = 0; b < state_.buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = state_.buckets[b];
    bucket_of_parameters_.emplace(bucket.flat().storage().unsafeGetStorageImpl(), b);
    bucket_of_slice_.emplace(state_.masters[b].storage().unsafeGetStorageImpl(), b);
    if (bucket.sharded()) bucket_of_parameters_.emplace(bucket.storage().released_storage().unsafeGetStorageImpl(), b);
  }
  marks_.emplace(state_.parameters);
  if (ranks_.all->size() > 1) lookups_.emplace(renormed_tables(*state_.module, state_.parameters), *ranks_.all);
  watch_ = std::make_unique<OpInterceptor>([this](const at::Tensor& tensor) { before_operator(tensor); });
  watch_->enable();
}

ShardedModel::~ShardedModel() { end(); }

void ShardedModel::before_operator(const at::Tensor& tensor) {
  const void* const storage = tensor.storage().unsafeGetStorageImpl();
  // In a forward that a backward pass may follow, not in an optimizer, which is to find them.
  if (marks_->present() && at::GradMode::is_enabled() && bucket_of_parameters_.contains(storage)) marks_->take_away();
  if (lookups_) lookups_->before_operator(tensor);
  const auto found = bucket_of_slice_.find(storage);
  if (found == bucket_of_slice_.end()) return;
  // An optimizer steps from the values that the program has given the parameters.
  state_.gatherer->held().publish_changes(found->second);
  if (OpInterceptor::changes_tensor()) slice_changes(found->second);
}

// Whole parameters are those before the change. Every rank's optimizer changes its slices.
void ShardedModel::slice_changes(size_t bucket) {
  gathers_->reshard_if_whole(bucket);
  // So that autograd refuses a backward() through a forward before the change. Last: the gatherer looks at versions.
  for (const zero::Parameter& parameter : state_.buckets[bucket].parameters()) {
    parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void ShardedModel::begin_pass() {
  marks_->take_away();
  if (lookups_) lookups_->rethrow();
  if (awaits_values_) require_values(*this);
  awaits_values_ = false;
  require_same_parameters(state_);
  sync_in_pass_ = sync_;
  gathers_->begin_backward(/*update_follows=*/sync_);
  state_.gradients.reducer->begin_backward(sync_, /*boundary=*/true);
}

void ShardedModel::end_pass() {
  zero::GradientReducer& reducer = *state_.gradients.reducer;
  reducer.end_backward();
  state_.gatherer->end_backward();
  if (sync_in_pass_) {
    reducer.finish();
    add_up_summed(state_, gradients_, ranks_);
    gradients_.hand_out(leaves_, state_.parameters);
    reducer.reset();
    marks_->put();
  }
  gathers_->end_pass();
}

void ShardedModel::abandon_pass() noexcept {
  try {
    if (!state_.gradients.reducer->failed()) state_.gradients.reducer->abandon_backward();
    state_.gradients.reducer->reset();
    for (const zero::Parameter& parameter : state_.parameters) parameter.tensor.mutable_grad().reset();
    state_.gatherer->change_mode();
  } catch (const std::exception& error) {
    log::error("fully_shard: after a backward pass that failed: ", without_stack(error.what()));
  }
}

void ShardedModel::require_between_passes(const char* call) {
  require(pass_ != nullptr, call, ": this unit has become part of another fully_shard; ask that one");
  require(!pass_->running(), call,
          " was called while a backward pass is running; call it after loss.backward() returns");
  state_.gatherer->wait_all();
  if (lookups_) lookups_->rethrow();
  for (size_t b = 0; b < state_.gatherer->buckets().size(); ++b) state_.gatherer->held().publish_changes(b);
}

void ShardedModel::end_as_unit() {
  require_between_passes("fully_shard");
  gathers_->reshard_all();  // with what the program has changed in place
  norms_.reset();           // the groups of the module around it take their place
  end();
}

void ShardedModel::end() {
  watch_.reset();  // first: it looks at marks_
  marks_.reset();
  pass_.reset();
  state_.gradients.reducer.reset();
  gathers_.reset();
  state_.gatherer = nullptr;
  state_.access.reset();
}

}  // namespace ds::loops
