#include "loops/shard_ranks.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/subgroups.h"
#include "core/check.h"
#include "dsengine/init_distributed.h"

namespace ds::loops {
namespace {

void require_one_source(const FullyShardOptions& options) {
  require<ConfigError>(!options.mesh || !options.process_group,
                       "fully_shard: expected one of .mesh and .process_group, found both; each of them names the "
                       "ranks. Remove one");
  require<ConfigError>(!options.sharding_strategy || !options.reshard_after_forward,
                       "fully_shard: expected one of .sharding_strategy and .reshard_after_forward, found both; the "
                       "names of FSDP1 say what becomes of parameters after forward. Remove one");
}

ShardRanks of_mesh(const comm::NamedMesh& mesh) {
  const std::vector<std::string>& axes = mesh.mesh_dim_names();
  require<ConfigError>(axes.size() == 1 || axes.size() == 2,
                       "fully_shard: .mesh: expected one axis, which shards, or two (copies, then shards), found ",
                       axes.size(), " in ", mesh.text(),
                       R"(. Name those of them: mesh["dp"], mesh[{"replicate", "shard"}])");
  ShardRanks ranks;
  ranks.all = mesh.get_group();
  ranks.shards = mesh.get_group(axes.back());
  if (axes.size() == 2 && mesh.size(axes.front()) > 1) ranks.replicas = mesh.get_group(axes.front());
  return ranks;
}

constexpr const char* kBothAxes =
    R"(: auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}), parallelize_module(*model, mesh["tp"], rules), )"
    R"(fully_shard(model, {.mesh = mesh["dp"]}))";

void require_mesh(const FullyShardOptions& options, const comm::Communicator& tensor) {
  require<ConfigError>(options.mesh.has_value(), "fully_shard: the module is split over ", tensor.size(),
                       " ranks (parallelize_module): expected .mesh, the data-parallel axis of a mesh whose other ",
                       "axis parallelize_module got, found ", options.process_group ? ".process_group" : "none",
                       kBothAxes);
}

// 2-D parallelism: what is sharded are parts of parameters.
void add_tensor_axis(ShardRanks& ranks, const FullyShardOptions& options, const comm::Communicator& tensor) {
  const auto both = options.mesh->joined_with(tensor);
  require<ConfigError>(both.has_value(), "fully_shard: .mesh: the module is split over ", tensor.size(),
                       " ranks (parallelize_module): expected a mesh with them along another axis, found ",
                       options.mesh->text(), ", beside which there is no such axis. Take both of one mesh", kBothAxes);
  const std::string& innermost = both->mesh_dim_names().back();
  const std::vector<std::string>& own = options.mesh->mesh_dim_names();
  require<ConfigError>(std::find(own.begin(), own.end(), innermost) == own.end(),
                       "fully_shard: .mesh: expected the axis that the module is split over as the innermost of ",
                       both->text(), ", found ", innermost, "; make the mesh with that axis last", kBothAxes);
  ranks.tensor = both->get_group(innermost);
  ranks.world = both->get_group();
}

// Every rank by itself: the others have copies.
void replicate(ShardRanks& ranks) {
  const int size = ranks.all->size();
  ranks.replicas = size > 1 ? ranks.all : nullptr;
  ranks.shards = comm::own_group(*ranks.all, comm::consecutive_ranks(size, 1), "shards");
}

}  // namespace

void shard_inside_hosts(ShardRanks& ranks, int ranks_per_host) {
  const int size = ranks.all->size();
  require<ConfigError>(size == 1 || (ranks_per_host > 1 && size % ranks_per_host == 0),
                       "fully_shard: HYBRID_SHARD without .mesh shards inside of each host: expected hosts with as "
                       "many consecutive ranks each, more than one, found ",
                       ranks_per_host == 1 ? std::string("hosts with one rank each, or with uneven or scattered ranks")
                                           : cat(ranks_per_host, " ranks of each host"),
                       " of ", size, R"( ranks; pass .mesh = init_device_mesh("cpu", {2, )",
                       R"(4}, {"replicate", "shard"}), or use FULL_SHARD)");
  if (size <= ranks_per_host) return;  // one host: there are no copies
  ranks.shards = comm::own_group(*ranks.all, comm::consecutive_ranks(size, ranks_per_host), "shards");
  ranks.replicas = comm::own_group(*ranks.all, comm::ranks_of_one_place(size, ranks_per_host), "replicas");
}

ShardRanks shard_ranks(const FullyShardOptions& options, c10::Device device, const comm::Communicator* tensor) {
  require_one_source(options);
  if (tensor) require_mesh(options, *tensor);
  const auto strategy = options.sharding_strategy;
  const bool hybrid = strategy == ShardingStrategy::kHybridShard;
  ShardRanks ranks;
  if (options.mesh) {
    ranks = of_mesh(*options.mesh);
  } else if (options.process_group) {
    ranks.all = ranks.shards = options.process_group;
  } else {
    const engine::Distributed job = engine::init_distributed({.device = options.device});
    ranks.all = ranks.shards = job.ranks;
    if (!options.device.empty()) device = job.device;
    if (hybrid) shard_inside_hosts(ranks, job.ranks_per_host);
  }
  ranks.device =
      (options.mesh || options.process_group) && !options.device.empty() ? c10::Device(options.device) : device;
  require<ConfigError>(
      !ranks.device.is_meta(),
      "fully_shard: the module is on the meta device: expected .device, where its slices shall be, found none. Their "
      "values come from .weights, a file, in the call for the whole model, or are loaded or made in place afterwards");
  if (strategy == ShardingStrategy::kNoShard) replicate(ranks);
  require<ConfigError>(
      !hybrid || !options.process_group,
      "fully_shard: HYBRID_SHARD: expected a mesh with two axes, the first one for copies, the second one for shards, "
      R"(found .process_group, of whose ranks nobody says which are of one host; pass .mesh = init_device_mesh("cpu", )"
      R"({2, 4}, {"replicate", "shard"}), or neither, for copies over the hosts of the job)");
  require<ConfigError>(
      !hybrid || !options.mesh || options.mesh->shape().size() == 2,
      "fully_shard: HYBRID_SHARD: expected a mesh with two axes, the first one for copies, the second "
      "one for shards, found one axis; name two, or pass no mesh, for copies over the hosts of the job");
  ranks.world = ranks.all;
  if (tensor) add_tensor_axis(ranks, options, *tensor);
  return ranks;
}

engine::Ranks engine_ranks(const ShardRanks& ranks) {
  engine::Ranks result;
  result.world = ranks.world;
  result.part = ranks.all;
  result.tensor = ranks.tensor;
  if (ranks.tensor) result.layers = ranks.world;
  result.device = ranks.device;
  result.local_rank = ranks.world->rank();
  result.groups.shards = ranks.shards;
  result.groups.replicas = ranks.replicas;
  const int size = ranks.shards->size();
  result.groups.parameters = comm::own_group(*ranks.shards, comm::consecutive_ranks(size, size), "parameters");
  return result;
}

ShardRanks ranks_of(const torch::nn::Module& module, const FullyShardOptions& options) {
  const std::vector<at::Tensor> parameters = module.parameters();
  require(!parameters.empty(), "fully_shard: expected a module with parameters, found none in ", module.name());
  const c10::Device device = parameters.front().device();
  const auto axis = tensor_axis_of(module);
  require<ConfigError>(!axis || !options.init, "fully_shard: .init: expected none for a module that ",
                       "parallelize_module has split, which has sliced nothing of it. Leave it out");
  ShardRanks ranks = shard_ranks(options, device, axis ? &axis->communicator() : nullptr);
  require<ConfigError>(!axis || ranks.device == device, "fully_shard: .device: expected ", device.str(),
                       ", where the parts of the module are that parallelize_module has split, found ",
                       ranks.device.str(), ". Move the module before it is split");
  return ranks;
}

std::shared_ptr<parallel::Axis> tensor_axis_of(const torch::nn::Module& module) {
  std::shared_ptr<parallel::Axis> axis;
  std::string first;
  for (const auto& item : module.named_parameters()) {
    if (!is_split(item.value())) continue;
    std::shared_ptr<parallel::Axis> own = parallel::axis_of(placement_of(item.value()));
    require(!axis || axis == own, "fully_shard: parameters ", first, " and ", item.key(), ": expected one axis, over ",
            "which one call of parallelize_module has split both, found two");
    if (axis) continue;
    axis = std::move(own);
    first = item.key();
  }
  return axis;
}

std::unique_ptr<engine::TensorParts> tensor_parts_of(const torch::nn::Module& module, const ShardRanks& ranks) {
  if (!ranks.tensor) return nullptr;
  auto parts = std::make_unique<engine::TensorParts>();
  parts->ranks = ranks.tensor;
  const int first = ranks.world->rank() - ranks.tensor->rank();
  for (int rank = 0; rank < ranks.tensor->size(); ++rank) parts->world_ranks.push_back(first + rank);
  parts->split.axis = tensor_axis_of(module);
  for (const auto& item : module.named_parameters()) {
    if (!is_split(item.value())) continue;
    parts->sums_wholes = parts->sums_wholes || placement_of(item.value()).summed;
    parts->parameters.push_back({item.key(), item.value(), leaf_of(item.value())});
  }
  return parts;
}

std::string split_text(const torch::nn::Module& module) {
  if (!tensor_axis_of(module)) return {};
  std::string text;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    text += cat("parameter ", item.key(), '\t', parameter.scalar_type(), ' ', parameter.sizes());
    if (is_split(parameter)) {
      const Placement& placement = placement_of(parameter);
      if (placement.cut) {
        text += cat(", cut along dimension ", placement.cut->dim, ", blocks ", at::IntArrayRef(placement.cut->blocks),
                    ", grain ", placement.cut->grain);
      }
      if (placement.summed) text += ", summed";
    }
    text += '\n';
  }
  return text;
}

}  // namespace ds::loops
