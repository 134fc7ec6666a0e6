#include "engine/setup/join_ranks.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/agreement.h"
#include "comm/flight/flight_watch.h"
#include "comm/job/joined_job.h"
#include "comm/job/rank_device.h"
#include "comm/meeting/host_identity.h"
#include "comm/meeting/rendezvous.h"
#include "comm/mesh_hosts.h"
#include "config/parse_steps.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/init_distributed.h"
#include "model/state/part_options.h"

namespace ds::engine {
namespace {

// Returns the options of the program's PipelineModule, which replace keys of the config; empty ones without such a
// module. With `one_stage` those are left out that say how layers lie on ranks.
pipeline::PipelineOptions given_pipeline(const InitializeOptions& options, bool one_stage) {
  const auto module = pipeline_of(options);
  if (!module) return {};
  pipeline::PipelineOptions given = module->options();
  if (!one_stage) return given;
  given.stages.reset();
  given.schedule.reset();
  given.chunks.reset();
  given.partition.reset();
  return given;
}

config::DsConfig parse_config(const InitializeOptions& options, int world_size, bool one_stage) {
  const pipeline::PipelineOptions given = given_pipeline(options, one_stage);
  config::DsConfig config = config::parse(
      options.config,
      {.world_size = world_size,
       .pipeline_stages = given.stages,
       .tensor_ranks =
           options.mesh ? std::optional<int64_t>(options.mesh->size(comm::MeshAxis::kTensor)) : std::nullopt,
       .sequence_ranks =
           options.mesh ? std::optional<int64_t>(options.mesh->size(comm::MeshAxis::kSequence)) : std::nullopt,
       .auto_values = options.auto_values});
  config::PipelineSection& section = config.pipeline;
  if (given.schedule) {
    section.schedule = *given.schedule;
    config::read_own_schedule(section);
  }
  if (given.chunks) section.chunks = *given.chunks;
  if (given.partition) section.partition = *given.partition;
  if (given.seed_layers) section.seed_layers = *given.seed_layers;
  if (given.activation_checkpoint_interval) {
    section.activation_checkpoint_interval = *given.activation_checkpoint_interval;
  }
  return config;
}

// The group that the program gives, and the device on it.
Distributed given_ranks(const InitializeOptions& options) {
  if (options.distributed) {
    Distributed job = *options.distributed;
    if (!options.device.empty()) job.device = device_of_rank(options.device, job.local_rank);
    return job;
  }
  const auto group = options.mesh           ? options.mesh->world()
                     : options.communicator ? options.communicator
                                            : options.init->ranks();
  // The program has made the group for a device, which nobody knows here.
  at::Device device = options.device.empty() ? at::Device(at::kCPU) : parse_device(options.device);
  if (device.is_cuda() && !device.has_index()) {
    require<ConfigError>(group->size() == 1, "initialize: .device: expected cuda:N with a group of ", group->size(),
                         " ranks, found cuda; name the device of this rank, or pass .distributed");
    device.set_index(0);
  }
  return {.ranks = group, .local_rank = group->rank(), .device = device};
}

// The ranks met before the config was read.
void configure_watch(comm::Communicator& ranks, const config::DsConfig& config) {
  if (!ranks.watch()) return;
  if (!config.flight_recorder.enabled) return ranks.watch()->stop();
  ranks.watch()->set_stall_limit(stall_limit(config));
  ranks.watch()->set_end_process(config.flight_recorder.end_process);
}

std::shared_ptr<comm::DeviceMesh> mesh_of(const InitializeOptions& options, const config::DsConfig& config,
                                          const std::shared_ptr<comm::Communicator>& world) {
  const auto stages = static_cast<int>(config.pipeline.stages.value_or(1));
  if (!options.mesh) {
    const auto tensor = static_cast<int>(std::max<int64_t>(1, config.tensor_parallel.autotp_size));
    const auto sequence = static_cast<int>(config.sequence_ranks());
    const comm::MeshLayout layout =
        comm::MeshLayout::fill_data({.pipe = stages, .sequence = sequence, .tensor = tensor}, world->size());
    return std::make_shared<comm::DeviceMesh>(world, layout);
  }
  require<ConfigError>(options.mesh->size(comm::MeshAxis::kPipe) == stages, "initialize: .mesh: axis pipe: expected ",
                       stages, ", which pipeline.stages says, found ", options.mesh->size(comm::MeshAxis::kPipe));
  return options.mesh;
}

// Ranks of a host among those that share a part of the model.
int64_t data_ranks_per_host(int64_t ranks_per_host, int64_t dp) {
  if (ranks_per_host >= dp) return dp;
  return dp % ranks_per_host == 0 ? ranks_per_host : 1;
}

}  // namespace

std::shared_ptr<pipeline::PipelineModule> pipeline_of(const InitializeOptions& options) {
  return std::dynamic_pointer_cast<pipeline::PipelineModule>(options.model);
}

Distributed join_ranks(const InitializeOptions& options, config::DsConfig& config, bool one_stage) {
  const int given = (options.mesh ? 1 : 0) + (options.communicator ? 1 : 0) + (options.distributed ? 1 : 0);
  require(given <= 1, "initialize: expected one of .mesh, .communicator and .distributed, found ", given,
          "; each of them names the ranks");
  if (given == 1 || options.init) {
    Distributed job = given_ranks(options);
    require(!options.init || options.init->ranks() == job.ranks, "initialize: .init was made over another ",
            "group than the one given; expected zero::Init init(group) and the same group here");
    config = parse_config(options, job.ranks->size(), one_stage);
    configure_watch(*job.ranks, config);
    return job;
  }
  // The backend is a key of the config, which may need the number of ranks to be read.
  const auto joined = JoinedJob::join(options.init_method, options.timeout);
  const comm::Rendezvous& meeting = joined->meeting();
  Distributed job{.local_rank = meeting.local_rank,
                  .ranks_per_host = ranks_per_host(meeting),
                  .device = device_of_rank(options.device, meeting.local_rank)};
  introduce_rank(meeting);
  config = parse_config(options, meeting.world_size, one_stage);
  job.ranks =
      joined->ranks(job.device, config.communication_backend, [&](const auto& place, comm::Communicator& ranks) {
        if (!config.flight_recorder.enabled) return;
        comm::watch_flight(place, ranks,
                           {.stall_limit = stall_limit(config),
                            .entries = static_cast<uint32_t>(config.flight_recorder.entries),
                            .folder = config.flight_recorder.folder,
                            .stacks = config.flight_recorder.stacks,
                            .end_process = config.flight_recorder.end_process});
      });
  configure_watch(*job.ranks, config);
  return job;
}

Ranks place_ranks(const Distributed& job, const InitializeOptions& options, const config::DsConfig& config) {
  Ranks ranks;
  ranks.world = job.ranks;
  ranks.local_rank = job.local_rank;
  ranks.device = job.device;
  ranks.mesh = mesh_of(options, config, ranks.world);
  using enum comm::MeshAxis;
  ranks.data = ranks.mesh->group({kData, kExpert});
  ranks.part = ranks.data;
  if (ranks.mesh->size(kSequence) > 1) {
    ranks.part = ranks.mesh->group({kData, kExpert, kSequence});
    ranks.sequence = ranks.mesh->group(kSequence);
    ranks.draws_alike_in_sequence = !options.cuts_sequences;
  }
  const int tensor = ranks.mesh->size(comm::MeshAxis::kTensor);
  if (tensor == 1) return ranks;
  ranks.tensor = ranks.mesh->group(comm::MeshAxis::kTensor);
  ranks.layers = ranks.mesh->size(comm::MeshAxis::kPipe) == 1
                     ? ranks.world
                     : ranks.mesh->group({comm::MeshAxis::kData, comm::MeshAxis::kExpert, comm::MeshAxis::kTensor});
  const comm::GridShape grid{.sizes = {ranks.world->size() / tensor, tensor}};
  const std::vector<int> hosts = comm::hosts_of(*ranks.world, ranks.device);
  if (!comm::inside_hosts(grid, 1, hosts)) {
    const auto names = comm::texts_of_ranks(comm::host_name(), ranks.device, *ranks.world, "names of hosts");
    ranks.tensor_crossing = comm::crossing_text(grid, 1, hosts, names);
  }
  const int pipe = ranks.mesh->size(comm::MeshAxis::kPipe);
  ranks.pipe_inside_host = comm::inside_hosts({.sizes = {pipe, ranks.world->size() / pipe}}, 0, hosts);
  return ranks;
}

Topology topology_of(const Ranks& ranks, int ranks_per_host) {
  const int64_t dp = ranks.part->size();
  const int64_t tensor = ranks.mesh->size(comm::MeshAxis::kTensor);
  const int64_t on_host = ranks_per_host % tensor == 0 ? ranks_per_host / tensor : 1;
  return {.world_size = ranks.world->size(),
          .dp = dp,
          .pipe = ranks.mesh->size(comm::MeshAxis::kPipe),
          .ranks_per_host = data_ranks_per_host(on_host, dp),
          .tensor = tensor,
          .sequence = ranks.sequence_ranks()};
}

}  // namespace ds::engine
