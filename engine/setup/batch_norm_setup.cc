#include "engine/setup/batch_norm_setup.h"

#include "comm/subgroups.h"
#include "core/log.h"
#include "layers/batch_norm/converted_layers.h"

namespace ds::engine {

size_t layers_that_wait_for_ranks(torch::nn::Module& module) { return norm::layers_without_ranks(module).size(); }

void set_up_batch_norms(ModelState& model, const config::DsConfig& config) {
  comm::Communicator& ranks = *model.ranks.part;
  if (config.broadcast_buffers && ranks.size() > 1) {
    model.ranks.groups.buffers = comm::own_group(ranks, comm::consecutive_ranks(ranks.size(), ranks.size()), "buffers");
  }
  const auto layers =
      config.sync_batchnorm ? norm::batch_norms_of(*model.module) : norm::layers_without_ranks(*model.module);
  model.ranks.groups.norms = norm::give_ranks(layers, ranks);
  if (config.sync_batchnorm && layers.empty() && !model.plan.pipeline && ranks.rank() == 0) {
    log::warning("sync_batchnorm: expected BatchNorm1d, 2d or 3d layers in the model, found none");
  }
}

}  // namespace ds::engine
