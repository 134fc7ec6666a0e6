#include "model/checkpoint/rank_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>
#include <torch/serialize.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <typeinfo>

#include "checkpoint/block_checksum.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/log.h"
#include "core/random_streams.h"
#include "core/tensor_check.h"
#include "core/text.h"
#include "dsengine/optimizer.h"

namespace ds::engine {
namespace {

// In the order of default_generators().
constexpr std::array kGenerators = {"rng.cpu", "rng.device"};
constexpr const char* kClientOptimizer = "client_optimizer";

// Returns the bytes that torch::save writes of an optimizer.
at::Tensor serialized(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  auto stream = classic_stream<std::ostringstream>();
  archive.save_to(stream);
  const std::string text = stream.str();
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

// In place of all that the optimizer has.
void take_serialized(const ModelState& model, const at::Tensor& bytes) {
  auto stream =
      classic_stream<std::istringstream>(std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
  torch::serialize::InputArchive archive;
  archive.load_from(stream, model.ranks.device);
  torch::optim::Optimizer& client = *model.optimizer.client;
  const std::vector<double> before = learning_rates(client);
  client.state().clear();
  client.load(archive);
  const std::vector<double> after = learning_rates(client);
  for (size_t i = 0; model.ranks.world->rank() == 0 && i < std::min(before.size(), after.size()); ++i) {
    if (before[i] == after[i]) continue;
    log::info("load_checkpoint: parameter group ", i, " has from the checkpoint, not from here: lr ", after[i],
              " (not ", before[i], ")");
  }
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

// Returns the path of an optimizer tensor that is equal on all ranks with this part of the model.
std::string part_path(const ModelState& model, const std::string& name) {
  return checkpoint::rank_path(model.ranks.first_of_part(), cat("optimizer.", name));
}

// Where a value lies in a checkpoint.
struct Place {
  std::string path;
  int64_t offset = 0;
  std::optional<int64_t> of = {};  // elements of what lies there, if it is more
};

// Finds the state of a parameter in a checkpoint that has one array of them for each part of the model, in the order of
// its parameters: only ranks that have the same parts can read it.
std::optional<Place> place_by_part(const ModelState& model, const checkpoint::Source& source, const std::string& state,
                                   int64_t number) {
  const int stages = model.pipeline_ranks();
  const bool same_parts = source.state().pipeline_stages == stages &&
                          (stages == 1 || source.state().world_size == model.ranks.world->size());
  const std::string path = part_path(model, state);
  const auto all = static_cast<int64_t>(model.infos.size());
  if (!same_parts || !source.contains(path) || source.info(path).numel() != all) return std::nullopt;
  return Place{.path = path, .offset = number, .of = all};
}

// Parameters that another rank has too, and writes.
std::set<std::string> written_elsewhere(const ModelState& model, const std::function<bool(size_t)>& is_written_here) {
  std::set<std::string> names;
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    if (is_written_here(b)) continue;
    for (const Segment& segment : model.buckets[b].layout().segments) {
      names.insert(model.infos[static_cast<size_t>(segment.parameter)].name);
    }
  }
  return names;
}

// Flat, by their paths in a checkpoint.
NamedTensors at_paths(int rank, const char* folder, const NamedTensors& memory) {
  NamedTensors result;
  for (const auto& [name, values] : memory) {
    result.emplace_back(checkpoint::rank_path(rank, cat(folder, name)), values.view({-1}));
  }
  return result;
}

// Whether a path of a checkpoint is that of a tensor in SaveOptions::rank_state of any rank.
bool is_rank_state(const std::string& path) {
  const std::string of_rank = checkpoint::name_in("ranks/", path);
  return of_rank.substr(of_rank.find('/') + 1).starts_with("state/");
}

std::string layout_text(int ranks, int stages, int tensor_ranks) {
  return cat(ranks, ranks == 1 ? " rank (" : " ranks (", stages,
             stages == 1 ? " pipeline stage, " : " pipeline stages, ", tensor_ranks,
             tensor_ranks == 1 ? " tensor rank)" : " tensor ranks)");
}

std::string fp8_path(const std::string& layer) { return checkpoint::rank_path(0, cat("fp8.", layer)); }

}  // namespace

NamedTensors optimizer_memory(const ModelState& model) {
  if (!model.optimizer.own) return {};
  return at_paths(model.ranks.world->rank(), "optimizer.", model.optimizer.own->rank_states());
}

std::string state_of_parameter(const std::string& shared_state) {
  const size_t slash = shared_state.find('/');
  return slash == std::string::npos ? std::string() : shared_state.substr(0, slash);
}

NamedTensors shared_optimizer_memory(const ModelState& model, const std::function<bool(size_t)>& is_written_here) {
  if (!model.optimizer.own) return {};
  const std::set<std::string> copies = written_elsewhere(model, is_written_here);
  NamedTensors result;
  for (const auto& [name, values] : model.optimizer.own->shared_states()) {
    const std::string state = state_of_parameter(name);
    if (state.empty()) {
      result.emplace_back(part_path(model, name), values.view({-1}));
    } else if (const std::string parameter = name.substr(state.size() + 1); !copies.contains(parameter)) {
      result.emplace_back(checkpoint::state_path(state, parameter), values.view({-1}));
    }
  }
  return result;
}

std::string load_shared_optimizer_memory(const ModelState& model, checkpoint::Source& source,
                                         const std::function<std::string(const std::string&)>& stored) {
  std::vector<std::string> missing;
  const bool differs = source.state().tensor_ranks != model.ranks.tensor_ranks();
  bool by_rank = false;                   // some of it, in a form or layout that does not fit
  std::map<std::string, int64_t> counts;  // of the parameters that have this state, so far
  for (const auto& [name, values] : model.optimizer.own->shared_states()) {
    const std::string state = state_of_parameter(name);
    Place place{.path = part_path(model, name)};
    if (!state.empty()) {
      const int64_t number = counts[state]++;
      const std::string parameter = stored(name.substr(state.size() + 1));
      if (parameter.empty()) continue;
      place.path = checkpoint::state_path(state, parameter);
      if (!source.contains(place.path)) {
        by_rank |= source.contains(checkpoint::rank_path(0, cat("optimizer.", state)));
        place = place_by_part(model, source, state, number).value_or(place);
      }
    }
    // With another number of tensor ranks: all of them had the same.
    if (state.empty() && !source.contains(place.path) && differs)
      place.path = checkpoint::rank_path(0, cat("optimizer.", name));
    if (!source.contains(place.path) || source.info(place.path).numel() != place.of.value_or(values.numel())) {
      missing.push_back(place.path);
      continue;
    }
    const at::Tensor saved = at::empty({values.numel()}, values.options().device(at::kCPU));
    source.read(place.path, place.offset, saved);
    at::Tensor(values).view({-1}).copy_(saved);
  }
  if (missing.empty()) return {};
  return cat("\"", missing.front(), "\"", missing.size() > 1 ? cat(" and ", missing.size() - 1, " more") : "",
             by_rank ? cat(" (it has them by rank: load it into the ", source.state().world_size, " ranks and ",
                           source.state().pipeline_stages, " pipeline stages that wrote it, and save it again)")
                     : "");
}

NamedTensors compression_memory(const ModelState& model) {
  if (!model.gradients.reduction) return {};
  return at_paths(model.ranks.world->rank(), "gradient_compression.", model.gradients.reduction->memory());
}

NamedTensors fp8_memory(const ModelState& model) {
  NamedTensors result;
  const std::vector<std::string>& layers = model.fp8->layers();
  for (size_t i = 0; i < layers.size(); ++i) {
    result.emplace_back(fp8_path(layers[i]), model.fp8->memory(static_cast<int64_t>(i)).view({-1}));
  }
  return result;
}

std::string load_fp8_memory(const ModelState& model, checkpoint::Source& source) {
  const std::vector<std::string>& layers = model.fp8->layers();
  model.fp8->forget();
  std::string missing;
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string path = fp8_path(layers[i]);
    const bool there = source.contains(path) && source.info(path).numel() % fp8::kKinds == 0;
    if (!there && missing.empty()) missing = layers[i];
    if (there) model.fp8->take(static_cast<int64_t>(i), source.tensor(path).view({fp8::kKinds, -1}));
  }
  return missing;
}

checkpoint::OptimizerState client_optimizer_state(const torch::optim::Optimizer& optimizer) {
  checkpoint::OptimizerState state{.type = c10::demangle(typeid(optimizer).name()), .step_count = 0, .groups = {}};
  for (const double lr : learning_rates(optimizer)) state.groups.push_back({.lr = lr});
  return state;
}

BufferCopies copy_buffers(const ModelState& model, const HostFolders& folders) {
  BufferCopies copies;
  for (const auto& item : model.module->named_buffers()) {
    const bool is_copy = model.is_copy(item.key());
    require(!is_copy || !folders.apart(),
            "save_checkpoint: checkpoint.use_node_local_storage excludes buffers of tied ", "layers, found ",
            item.key(), ", which the first of their stages writes for all. Set it to false, or let ",
            "the layers share parameters alone");
    if (is_copy) continue;
    copies.values.emplace_back(item.key(),
                               item.value().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true).contiguous());
  }
  copies.checksums = checksums_of(copies.values);
  return copies;
}

void add_buffers(const ModelState& model, const HostFolders& folders, const BufferCopies& copies,
                 NamedTensors& tensors) {
  if (copies.values.empty()) return;
  const at::Tensor& own = copies.checksums;
  at::Tensor first = own.clone().to(model.ranks.device);
  // Ranks of a tensor axis have parts of parameters, but buffers as other ranks of the job.
  comm::Communicator& sharing = model.ranks.layer_ranks();
  if (sharing.size() > 1) sharing.broadcast(first, 0, "checksums of buffers").wait();
  first = first.to(at::kCPU);
  const bool sees_first = folders.shares(model.ranks.first_of_layer_ranks());
  for (size_t i = 0; i < copies.values.size(); ++i) {
    const auto& [name, values] = copies.values[i];
    if (sharing.rank() == 0) {
      tensors.emplace_back(checkpoint::buffer_path(name), values);
    } else if (!sees_first || first.const_data_ptr<int64_t>()[i] != own.const_data_ptr<int64_t>()[i]) {
      tensors.emplace_back(checkpoint::rank_path(model.ranks.world->rank(), checkpoint::buffer_path(name)), values);
    }
  }
}

NamedTensors generator_states(const ModelState& model) {
  NamedTensors tensors;
  for (const at::Generator& generator : default_generators(model.ranks.device)) {
    const char* name = kGenerators.at(tensors.size());
    tensors.emplace_back(checkpoint::rank_path(model.ranks.world->rank(), name), generator_state(generator));
  }
  return tensors;
}

NamedTensors rank_tensors(const ModelState& model, const HostFolders& folders) {
  NamedTensors tensors;
  if (const auto& states = model.optimizer.client_states) {
    require(std::all_of(states->begin(), states->end(), [](const auto& state) { return state.is_known; }),
            "save_checkpoint: the states of the optimizer ", optimizers::client_name(*model.optimizer.client),
            " are of a class that does not write its tensors in serialize(): write it, let it keep one of torch's, "
            "such as ",
            "torch::optim::AdamParamState, or save the weights alone with save_16bit_model()");
  }
  if (model.optimizer.steps_on_parameters() && folders.leads()) {
    tensors.emplace_back(checkpoint::rank_path(0, kClientOptimizer), serialized(*model.optimizer.client));
  }
  return tensors;
}

NamedTensors rank_state_tensors(const ModelState& model, const RankState& given, bool copies) {
  NamedTensors tensors;
  for (const auto& [name, values] : given) {
    const bool has_memory = values.defined() && values.layout() == at::kStrided && !values.is_meta();
    require(!name.empty() && has_memory && safetensors_holds(values.scalar_type()), "save_checkpoint: rank_state: \"",
            name, "\" of rank ", model.ranks.world->rank(),
            ": expected a name and a dense tensor with memory, of a floating-point, integer or bool type, found ",
            describe(values));
    at::Tensor host = values.detach().resolve_neg().to(at::kCPU).contiguous();
    if (copies && host.is_alias_of(values)) host = host.clone();
    tensors.emplace_back(checkpoint::rank_state_path(model.ranks.world->rank(), name), std::move(host));
  }
  return tensors;
}

RankState read_rank_state(const ModelState& model, checkpoint::Source& source, bool same_ranks) {
  const std::string own = checkpoint::rank_state_path(model.ranks.world->rank(), "");
  RankState state;
  for (const auto& [path, tensor] : source.tensors()) {
    if (!is_rank_state(path)) continue;
    const checkpoint::TrainingState& saved = source.state();
    require(same_ranks, source.location(), ": load_checkpoint: rank_state was saved by ",
            layout_text(saved.world_size, saved.pipeline_stages, saved.tensor_ranks), ", expected as many as here: ",
            layout_text(model.ranks.world->size(), model.pipeline_ranks(), model.ranks.tensor_ranks()),
            ", for only the program knows which rank goes on with which tensors. Pass load_rank_state = false, which ",
            "gives none, and read them by checkpoint::open(\"", source.location(),
            "\")->tensor(checkpoint::rank_state_path(rank, name))");
    const std::string name = checkpoint::name_in(own, path);
    if (!name.empty()) state.emplace(name, source.tensor(path));
  }
  return state;
}

std::string buffer_for(const checkpoint::Source& source, int rank, bool same_ranks, const std::string& name) {
  std::string common = checkpoint::buffer_path(name);
  std::string own = checkpoint::rank_path(rank, common);
  if (same_ranks && source.contains(own)) return own;
  if (source.contains(common)) return common;
  return source.contains(checkpoint::weight_path(name)) ? checkpoint::weight_path(name) : std::string();
}

void load_generators(const ModelState& model, checkpoint::Source& source, bool same_ranks) {
  if (!same_ranks) return;
  const std::vector<at::Generator> generators = default_generators(model.ranks.device);
  for (size_t i = 0; i < generators.size(); ++i) {
    const std::string path = checkpoint::rank_path(model.ranks.world->rank(), kGenerators.at(i));
    if (source.contains(path)) set_generator_state(generators[i], source.tensor(path));
  }
}

void require_client_optimizer(const ModelState& model, const checkpoint::Source& source) {
  const std::string path = checkpoint::rank_path(0, kClientOptimizer);
  require(source.contains(path), source.location(), ": load_checkpoint: the engine has a client optimizer, the ",
          "checkpoint has no state of one; pass load_optimizer_states = false to begin with a fresh one");
  const checkpoint::OptimizerState own = client_optimizer_state(*model.optimizer.client);
  const checkpoint::OptimizerState saved = source.state().optimizer.value_or(checkpoint::OptimizerState());
  require(saved.type == own.type && saved.groups.size() == own.groups.size(), source.location(),
          ": load_checkpoint: expected the state of a client optimizer ", own.type, " with ", own.groups.size(),
          " parameter groups, found ", saved.type, " with ", saved.groups.size(),
          "; pass load_optimizer_states = false to begin with a fresh one");
}

void load_client_optimizer(const ModelState& model, checkpoint::Source& source) {
  take_serialized(model, source.tensor(checkpoint::rank_path(0, kClientOptimizer)));
}

}  // namespace ds::engine
