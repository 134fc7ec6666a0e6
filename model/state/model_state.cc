#include "model/state/model_state.h"

#include <algorithm>
#include <utility>

#include "model/stages/tied_weights.h"

namespace ds::engine {

zero::BucketGroups ModelState::groups_of(size_t /*bucket*/) const {
  return {.shards = *ranks.groups.shards, .replicas = ranks.groups.replicas.get()};
}

std::vector<comm::Communicator*> ModelState::all_groups() const {
  const RankGroups& groups = ranks.groups;
  std::vector<comm::Communicator*> all = {ranks.world.get()};
  std::vector<std::shared_ptr<comm::Communicator>> others = {ranks.part,    ranks.data,      ranks.sequence,
                                                             groups.shards, groups.replicas, groups.parameters,
                                                             groups.node,   groups.norms,    groups.buffers};
  if (tensor) others.push_back(tensor->ranks);
  if (pipeline) {
    others.push_back(pipeline->ranks);
    for (const TiedWeights& tied : pipeline->tied) others.push_back(tied.ranks);
    for (auto& group : pipeline->runner->messages().groups()) others.push_back(std::move(group));
  }
  if (groups.quantized) others.insert(others.end(), {groups.quantized->inside(), groups.quantized->across()});
  for (auto& group : groups.compression.all()) others.push_back(std::move(group));
  for (const auto& group : others) {
    if (group && std::find(all.begin(), all.end(), group.get()) == all.end()) all.push_back(group.get());
  }
  return all;
}

at::Tensor ModelState::own_part(size_t bucket) const {
  return plan.partition_optimizer ? buckets[bucket].slice(groups_of(bucket).shards.rank()) : buckets[bucket].flat();
}

void ModelState::use_master(size_t bucket, bool changes, const std::function<void(const at::Tensor&)>& use) const {
  if (!offloaded) return use(masters[bucket]);
  offloaded->use(bucket, changes, [&] { use(masters[bucket]); });
}

void ModelState::for_each_on_host(const std::function<void(size_t)>& update) const {
  if (offloaded) offloaded->for_each(update);
}

bool ModelState::counts(size_t bucket) const {
  return std::all_of(axes->list.begin(), axes->list.end(),
                     [bucket](const Axis& axis) { return axis.counts_bucket(bucket); });
}

bool ModelState::counts_in_stage(size_t bucket) const {
  return std::all_of(axes->list.begin(), axes->list.end(), [bucket](const Axis& axis) {
    return axis.name == comm::MeshAxis::kTensor || axis.counts_bucket(bucket);
  });
}

void ModelState::choose_gradients() const {
  if (optimizer.own) gradients.reducer->keep_local(optimizer.own->wants_local_gradients());
}

}  // namespace ds::engine
