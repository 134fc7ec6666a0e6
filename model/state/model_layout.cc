#include "model/state/model_layout.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/tensor_check.h"
#include "model/state/tensor_parts.h"
#include "zero/partition.h"

namespace ds::engine {
namespace {

// Chooses the parameters that stay whole at stage 3, in module order.
class PersistenceBudget {
 public:
  explicit PersistenceBudget(const BucketOptions& options)
      : largest_(options.shard ? options.persistent_numel : -1), left_(options.persistent_total) {}
  bool takes(int64_t numel) {
    if (numel > largest_ || numel > left_) return false;
    left_ -= numel;
    return true;
  }

 private:
  int64_t largest_;
  int64_t left_;
};

// Neither reductions nor files of weights know complex numbers, and a cast would drop the imaginary parts.
void require_real(const char* what, const std::string& name, const at::Tensor& tensor) {
  require(!tensor.is_complex(), what, " ", name, ": expected real numbers, found ", describe(tensor),
          ". Register torch::view_as_real(w) in its place, real numbers of shape [..., 2], and use ",
          "torch::view_as_complex() of it in forward, which loses nothing; model->to(torch::kFloat) would drop the ",
          "imaginary parts");
}

// Returns the trainable parameters of each part.
std::vector<std::pair<int, std::vector<size_t>>> parts_of(const ModelParameters& parameters,
                                                          const BucketOptions& options) {
  std::vector<std::pair<int, std::vector<size_t>>> parts;  // in the order of their first parameters
  bool any_split = false;
  for (size_t i = 0; i < parameters.trainable.size(); ++i) {
    const int part = options.parts.empty() ? 0 : options.parts[i];
    auto found = std::find_if(parts.begin(), parts.end(), [&](const auto& entry) { return entry.first == part; });
    if (found == parts.end()) found = parts.insert(parts.end(), {part, {}});
    found->second.push_back(i);
    any_split = any_split || parameters.trainable[i].part != nullptr;
  }
  // Over a tensor axis whole ones first. Buckets are reduced from the last to the first, and those of biases and norms,
  // also of the first layer, have their gradients at the end of backward alone: nothing waits for them. Their numbers
  // are then the same on all ranks of the axis, whose parts may be uneven.
  if (any_split) std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return parts;
}

// Gives tied parameters their further names, by identity of what is trained.
void take_other_names(const std::unordered_map<const void*, std::vector<std::string>>& names, ModelParameters& result) {
  if (names.empty()) return;
  for (auto* list : {&result.trainable, &result.frozen}) {
    for (zero::Parameter& parameter : *list) {
      const auto found = names.find(parameter.tensor.unsafeGetTensorImpl());
      if (found != names.end()) parameter.other_names = found->second;
    }
  }
  for (size_t i = 0; i < result.infos.size(); ++i) result.infos[i].other_names = result.trainable[i].other_names;
}

}  // namespace

ModelParameters collect_parameters(const torch::nn::Module& module, bool trains, bool split) {
  ModelParameters result;
  std::unordered_set<const void*> seen;
  std::unordered_map<const void*, std::vector<std::string>> other_names;
  for (const auto& item : module.named_parameters()) {
    require(split || !is_split(item.value()), "parameter ", item.key(), " is split over ranks already ",
            "(parallel::parallelize_module): expected a whole module. engine::initialize splits one by itself, by ",
            "InitializeOptions::split and tensor_parallel.autotp_size; fully_shard takes a split one with .mesh, ",
            "DistributedDataParallel whole ones only");
    const at::Tensor tensor = trained_tensor(item.value());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
      other_names[tensor.unsafeGetTensorImpl()].push_back(item.key());
      continue;
    }
    const std::shared_ptr<const TensorPart> part = part_of_parameter(item.value());
    require_real("parameter", item.key(), tensor);
    const auto dtype = tensor.scalar_type();
    require((dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf) &&
                tensor.layout() == at::kStrided,
            "parameter ", item.key(), ": expected a dense float32, float64, bfloat16 or float16 tensor, found ",
            describe(tensor), lazy([&] {
              return at::isFloatingType(dtype) || tensor.requires_grad()
                         ? cat("; convert the model first, for example with model->to(torch::kFloat)")
                         : cat("; what is no weight, as an order or integers of a quantized layer, is a buffer: ",
                               "register_buffer(\"", item.key().substr(item.key().rfind('.') + 1), "\", values)");
            }));
    const bool may_have_hooks = tensor.requires_grad();  // else it may even lack what holds them
    require(!may_have_hooks || torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr, "parameter ", item.key(),
            ": belongs to another engine, or to a wrapper (ds::DistributedDataParallel); destroy that one first");
    if (!trains && tensor.requires_grad()) {
      result.frozen_here.freeze(tensor);
      if (is_split(item.value())) result.frozen_here.freeze(item.value());  // whose leaf follows it
    }
    if (tensor.requires_grad()) {
      result.trainable.push_back({item.key(), tensor, part});
      result.infos.push_back({item.key(), tensor.sizes().vec(), tensor.numel()});
    } else {
      result.frozen.push_back({item.key(), tensor, part});
    }
  }
  take_other_names(other_names, result);
  for (const auto& item : module.named_buffers()) {
    require_real("buffer", item.key(), item.value());
    result.buffers.push_back({item.key(), item.value()});
  }
  require(!trains || !result.trainable.empty(), "model: expected at least one trainable parameter, found ",
          result.frozen.size(), " frozen and none trainable; call set_requires_grad(true) on what is to be trained");
  return result;
}

ModelLayout lay_out(const ModelParameters& parameters, const std::vector<int>& groups, const BucketOptions& options,
                    int ranks) {
  PersistenceBudget persistent_budget(options);
  // Lays out the parameters `chosen` of a list, in the numbers of the list.
  const auto layout_of = [&](const std::vector<zero::Parameter>& list, const std::vector<int>& group_of,
                             const std::vector<size_t>& chosen, bool shared) {
    std::vector<zero::LayoutParameter> shapes;
    for (const size_t i : chosen) {
      const int64_t numel = list[i].tensor.numel();
      const bool has_width = &list == &parameters.trainable && !options.row_widths.empty();
      const int64_t row_width = has_width ? options.row_widths[i] : 0;
      const bool persistent = !shared && row_width == 0 && persistent_budget.takes(numel);
      shapes.push_back({list[i].name, numel, group_of[i], static_cast<int>(options.dtype), persistent});
      shapes.back().row_width = row_width;
      if (options.sent_as && options.sent_in_it.contains(list[i].tensor.unsafeGetTensorImpl())) {
        shapes.back().sent_as = static_cast<int>(*options.sent_as);
      }
    }
    std::vector<zero::BucketLayout> buckets =
        zero::lay_out(shapes, {.world_size = options.partition ? ranks : 1,
                               .max_bucket_elements = options.max_bucket_elements,
                               .target_bucket_elements = shared ? options.max_bucket_elements : 0,
                               .most_target_elements = options.most_target_elements});
    for (zero::BucketLayout& bucket : buckets) {
      for (Segment& segment : bucket.segments) {
        segment.parameter = static_cast<int64_t>(chosen[static_cast<size_t>(segment.parameter)]);
      }
    }
    return buckets;
  };
  ModelLayout layout;
  for (const auto& [part, chosen] : parts_of(parameters, options)) {
    const bool shared =
        std::find(options.shared_parts.begin(), options.shared_parts.end(), part) != options.shared_parts.end();
    for (zero::BucketLayout& bucket : layout_of(parameters.trainable, groups, chosen, shared)) {
      layout.buckets.push_back(std::move(bucket));
      layout.part_of.push_back(part);
    }
  }
  if (options.shard) {
    for (const bool split : {false, true}) {  // whole ones lie alike on all ranks of a tensor axis
      std::vector<size_t> chosen;
      for (size_t i = 0; i < parameters.frozen.size(); ++i) {
        if ((parameters.frozen[i].part != nullptr) == split) chosen.push_back(i);
      }
      const std::vector<int> no_groups(parameters.frozen.size(), 0);
      for (zero::BucketLayout& bucket : layout_of(parameters.frozen, no_groups, chosen, false)) {
        layout.frozen.push_back(std::move(bucket));
      }
    }
  }
  return layout;
}

namespace {

void place_buffers(const ModelParameters& parameters, const BucketOptions& options, StartValues& start) {
  for (const zero::Parameter& buffer : parameters.buffers) {
    at::Tensor tensor = buffer.tensor;
    if (!start.keeps(tensor)) {
      const at::Tensor values = start.of(buffer);
      // Other tensors may share a buffer's memory, unless it is spread over fewer elements than it shows.
      if (tensor.device() == values.device() && tensor.is_non_overlapping_and_dense()) {
        tensor.copy_(values);
      } else {
        zero::point_to(tensor, values);
      }
    }
    const bool kept = options.float32_buffers.contains(tensor.unsafeGetTensorImpl());
    const std::optional<at::ScalarType> dtype = kept ? at::kFloat : options.buffer_dtype;
    if (dtype && tensor.is_floating_point()) tensor.set_data(tensor.to(*dtype));
  }
}

}  // namespace

BucketedModel build_buckets(const ModelParameters& parameters, ModelLayout layouts, const BucketOptions& options,
                            StartValues& start, OffloadedState* offloaded, comm::Communicator& shards) {
  const at::NoGradGuard no_grad;
  BucketedModel model;
  const std::shared_ptr<SliceStore> store = offloaded ? offloaded->parameter_slices() : nullptr;
  for (zero::BucketLayout& layout : layouts.buckets) {
    const auto dtype = static_cast<at::ScalarType>(layout.dtype);
    if (options.shard && layout.row_width > 0) {  // no rank ever has the whole: Note [Row-wise tables]
      const at::Tensor slice = start.of_slice(layout, parameters.trainable);
      model.buckets.emplace_back(std::move(layout), parameters.trainable, slice);
      model.masters.push_back(slice);
      continue;
    }
    const at::Tensor values = start.of_bucket(layout, parameters.trainable);
    model.buckets.emplace_back(std::move(layout), parameters.trainable, values, dtype);
    zero::ParameterBucket& bucket = model.buckets.back();
    const int rank = options.partition ? shards.rank() : 0;
    const bool sharded = options.shard && !bucket.layout().persistent;
    // The values from before the cast, except where the slice itself is the master.
    const at::Tensor own = values.narrow(0, rank * bucket.layout().slice_numel, bucket.layout().slice_numel);
    at::Tensor master;
    if (offloaded && offloaded->updates(model.masters.size())) {
      master = offloaded->master_of(model.masters.size(), own, sharded);
    } else if (dtype != options.master_dtype || options.separate_master || (sharded && store)) {
      master = own.to(options.master_dtype, /*non_blocking=*/false, /*copy=*/true);
    }
    if (sharded) bucket.shard(rank, 0, options.store_of ? options.store_of(master) : store);
    model.masters.push_back(master.defined() ? master : bucket.slice(rank));
  }
  if (options.shard) {
    for (zero::BucketLayout& layout : layouts.frozen) {
      const at::Tensor values = start.of_bucket(layout, parameters.frozen);
      model.frozen_buckets.emplace_back(std::move(layout), parameters.frozen, values, options.dtype);
      if (model.frozen_buckets.back().layout().persistent) continue;
      model.frozen_buckets.back().shard(shards.rank(), options.frozen_bits,
                                        options.store_of ? options.store_of(/*master=*/{}) : store);
    }
  } else {
    for (const zero::Parameter& parameter : parameters.frozen) {
      zero::point_to(parameter.tensor, start.of(parameter).to(options.dtype));
    }
  }
  place_buffers(parameters, options, start);
  return model;
}

}  // namespace ds::engine
