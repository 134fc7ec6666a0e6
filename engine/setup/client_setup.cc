#include "engine/setup/client_setup.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/split/split_tensor.h"
#include "dsengine/pipeline.h"
#include "model/state/tensor_parts.h"
#include "optim/client_optimizer.h"
#include "optim/elementwise_probe.h"

namespace ds::engine {
namespace {

using optimizers::ClientState;
using torch::optim::OptimizerParamGroup;

// Whether ranks, or their masters, have something else than the model's parameters as they are.
bool needs_slices(const config::DsConfig& config, const Ranks& ranks) {
  const bool has_parts = ranks.tensor || ranks.layer_ranks().size() < ranks.world->size();
  return config.zero_optimization.stage > 0 || config.fp16.enabled || config.bf16.enabled || has_parts;
}

// What the optimizer keeps of a parameter; null: nothing.
torch::optim::OptimizerParamState* state_of(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

// Steps that a state has seen. torch's SGD counts none: its buffer is there after the first.
int64_t steps_of(torch::optim::OptimizerParamState& state) {
  const auto fields = optimizers::fields_of(state);
  if (!fields) return 0;
  if (fields->step) return *fields->step;
  return std::any_of(fields->tensors.begin(), fields->tensors.end(),
                     [](const auto& one) { return one.second->defined(); })
             ? 1
             : 0;
}

// The optimizer has stepped on its own so often.
int64_t steps_before(const torch::optim::Optimizer& optimizer, const std::vector<zero::Parameter>& parameters,
                     const std::unordered_map<const void*, at::Tensor>& given) {
  std::optional<int64_t> steps;
  std::string first;
  for (const zero::Parameter& parameter : parameters) {
    const auto own = given.find(parameter.tensor.unsafeGetTensorImpl());
    if (own == given.end()) continue;
    auto* const state = state_of(optimizer, own->second);
    require(!state || optimizers::fields_of(*state), "initialize: .optimizer: ", optimizers::client_name(optimizer),
            " has a state of ", parameter.name,
            " of a class of its own, which is not taken over. Give initialize() an ", "optimizer that has not stepped");
    const int64_t count = state ? steps_of(*state) : 0;
    require(!steps || *steps == count, "initialize: .optimizer: expected states of one number of steps, found ",
            steps.value_or(0), " of ", first, " and ", count, " of ", parameter.name,
            ", which had no gradient in some: ",
            "slices count steps together. Give initialize() an optimizer that has not stepped");
    if (!steps) first = parameter.name;
    steps = count;
  }
  return steps.value_or(0);
}

std::unordered_map<const void*, at::Tensor> tensors_of(const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, at::Tensor> given;  // by what is trained
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      given.emplace(trained_tensor(parameter).unsafeGetTensorImpl(), parameter);
    }
  }
  return given;
}

// By parameter: this rank's elements of what the optimizer keeps of it, flat.
std::vector<optimizers::NamedStates> previous_states(const torch::optim::Optimizer& optimizer,
                                                     const std::vector<zero::Parameter>& parameters) {
  const auto given = tensors_of(optimizer);
  std::vector<optimizers::NamedStates> result(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto own = given.find(parameters[i].tensor.unsafeGetTensorImpl());
    auto* const state = own == given.end() ? nullptr : state_of(optimizer, own->second);
    const auto fields = state ? optimizers::fields_of(*state) : std::nullopt;
    if (!fields) continue;
    const TensorPart* const part = parameters[i].part.get();
    for (const auto& [name, tensor] : fields->tensors) {
      if (!tensor->defined()) continue;
      const at::Tensor whole = is_split(*tensor) ? part_of(*tensor) : part ? slice_of(*tensor, *part) : *tensor;
      result[i].emplace_back(name, whole.detach().reshape({-1}));
    }
  }
  return result;
}

size_t parameters_in(const torch::optim::Optimizer& optimizer) {
  size_t count = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) count += group.params().size();
  return count;
}

// What a program does whose optimizer is not over the parameters of the model.
constexpr const char* kLayersAreBuilt =
    "The layers of a pipeline::PipelineModule are built by initialize: give a function that makes the optimizer over "
    "the parameters of the model that it gets, .make_optimizer, in its place";

// Options of classes of the program's need not say a learning rate.
void require_rates(const torch::optim::Optimizer& optimizer, const std::string& name) {
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    try {
      group.options().get_lr();
    } catch (const c10::Error&) {
      throw ConfigError(cat("initialize: .optimizer: the options of ", name, " do not say a learning rate; override ",
                            "get_lr() and set_lr() in its class of options"));
    }
  }
}

}  // namespace

void require_client(const InitializeOptions& options) {
  require<ConfigError>(!options.make_optimizer || (!options.optimizer && !options.torch_scheduler),
                       "initialize: .make_optimizer: expected neither .optimizer nor .torch_scheduler with it, found ",
                       options.optimizer ? ".optimizer" : ".torch_scheduler, which needs an optimizer that is there",
                       "; remove one of the two");
  if (!options.optimizer) return;
  require<ConfigError>(parameters_in(*options.optimizer) > 0,
                       "initialize: .optimizer: expected parameters of the model, found none in ",
                       optimizers::client_name(*options.optimizer), ". ", kLayersAreBuilt);
}

ModelOptimizer describe_client(const InitializeOptions& options, const config::DsConfig& config, const Ranks& ranks) {
  ModelOptimizer result;
  result.client = options.optimizer;
  if (!options.optimizer) return result;
  torch::optim::Optimizer& optimizer = *options.optimizer;
  const std::string name = optimizers::client_name(optimizer);
  std::optional<std::vector<ClientState>> states = optimizers::states_of_torch(optimizer);
  if (!states && !needs_slices(config, ranks)) return result;
  if (!states) {
    require_rates(optimizer, name);
    const bool wants_closure = name == "LBFGS";
    optimizers::ElementwiseProbe probe;
    if (!wants_closure) probe = optimizers::probe_elementwise(optimizer);
    if (wants_closure) probe.problem = "computes the loss several times inside of step(), from all parameters";
    require<ConfigError>(
        probe.problem.empty(), "initialize: .optimizer: ", name, " ", probe.problem,
        ". With ZeRO stages 1 to 3, fp16, bf16, tensor_parallel and several pipeline stages an optimizer works on ",
        "flat slices of parameters, each element by itself. Expected zero_optimization.stage 0 in float32 with it, ",
        "on ranks that have the whole model, or another optimizer: torch's SGD, Adam, AdamW, RMSprop, Adagrad, or ",
        "the optimizer section of the config");
    states = std::move(probe.states);
  }
  result.client_states = std::make_shared<const std::vector<ClientState>>(std::move(*states));
  return result;
}

void require_compatible_client(const ModelOptimizer& optimizer, const InitializeOptions& options, const Plan& plan) {
  if (!optimizer.client) return;
  require<ConfigError>(
      options.parameter_groups.empty(),
      "initialize: .parameter_groups belong to the optimizer of the config; a client optimizer has its ",
      "own groups. Remove one of the two");
  const std::string name = optimizers::client_name(*optimizer.client);
  if (!optimizer.client_states) {
    require<ConfigError>(plan.gradient_dtype == plan.model_dtype, "data_types.grad_accum_dtype: expected ",
                         name_of(plan.model_dtype), ", the model's, with the client optimizer ", name,
                         ", which works on whole parameters, found ", name_of(plan.gradient_dtype), "; remove the key");
    return;
  }
  const auto require_absent = [&](bool given, const char* key, const char* why) {
    require<ConfigError>(!given, key, ": expected false with the client optimizer ", name, ", found true: ", why,
                         "; remove the key, or use the optimizer section of the config");
  };
  require_absent(plan.offload.speculative, "zero_optimization.offload_optimizer.super_offload",
                 "it takes back updates, which only optimizers of the config can");
  require_absent(plan.offload.delayed, "zero_optimization.offload_optimizer.delayed_update",
                 "the update would run beside the program, which may change the optimizer's groups meanwhile");
  const bool known = std::all_of(optimizer.client_states->begin(), optimizer.client_states->end(),
                                 [](const ClientState& state) { return state.is_known && !state.is_written; });
  require<ConfigError>(known || plan.offload.optimizer != zero::Home::kFile,
                       "zero_optimization.offload_optimizer.device: expected \"cpu\" with the client optimizer ", name,
                       ", found \"nvme\": its states are of a class of its own, whose tensors cannot be put into a ",
                       "file; let it keep one of torch's, such as torch::optim::AdamParamState");
}

void make_client(ModelState& model, InitializeOptions& options, const config::DsConfig& config) {
  std::exception_ptr failure;
  try {
    options.optimizer = options.make_optimizer(*options.model);
    require<ConfigError>(options.optimizer != nullptr,
                         "initialize: .make_optimizer: expected an optimizer, found null");
    model.optimizer = describe_client(options, config, model.ranks);
    require_compatible_client(model.optimizer, options, model.plan);
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = comm::failed_rank(failure, model.ranks.device, *model.ranks.world);
  require<ConfigError>(failed < 0, "initialize: .make_optimizer: rank ", failed, " has failed; its message says why");
  const auto own = static_cast<double>(parameters_in(*options.optimizer));  // none of a stage that stays as it is
  require<ConfigError>(
      comm::mean_of_ranks(own, model.ranks.device, *model.ranks.world, "parameters of .make_optimizer") > 0,
      "initialize: .make_optimizer: expected parameters of the model, found none on any rank in ",
      optimizers::client_name(*options.optimizer), "; make it over those of the model that it gets");
}

std::string client_lines(const ModelOptimizer& optimizer) {
  if (!optimizer.client) return {};
  return cat("a client optimizer\t", optimizers::client_name(*optimizer.client), '\n',
             group_lines(optimizer.group_options()));
}

OptimizerGroups client_groups(const ModelOptimizer& optimizer, const ModelParameters& parameters,
                              const torch::nn::Module& module) {
  const torch::optim::Optimizer& client = *optimizer.client;
  std::unordered_map<const void*, int> group_of;
  std::unordered_map<const void*, bool> known;
  for (const auto& item : module.named_parameters()) known[trained_tensor(item.value()).unsafeGetTensorImpl()] = true;
  if (const auto* const layers = dynamic_cast<const pipeline::PipelineModule*>(&module)) {
    for (const pipeline::LayerSpec& layer : layers->layers()) {
      if (!layer.given) continue;
      for (const at::Tensor& parameter : layer.given->parameters()) {
        known[trained_tensor(parameter).unsafeGetTensorImpl()] = true;
      }
    }
  }
  OptimizerGroups groups;
  for (const OptimizerParamGroup& group : client.param_groups()) {
    const auto number = static_cast<int>(groups.options.size());
    for (const at::Tensor& parameter : group.params()) {
      require(known.contains(trained_tensor(parameter).unsafeGetTensorImpl()),
              "initialize: .optimizer: expected parameters of the model, found a tensor of shape ", parameter.sizes(),
              " in its group ", number, " that is none: was the optimizer made for another model, or given to ",
              "another engine? Make one over model->parameters() for each engine. ", kLayersAreBuilt);
      group_of[trained_tensor(parameter).unsafeGetTensorImpl()] = number;
    }
    groups.options.push_back(optimizers::group_options_of(group.options()));
  }
  steps_before(client, parameters.trainable, tensors_of(client));  // throws on all ranks
  const auto none = static_cast<int>(groups.options.size());
  std::string absent;
  for (const zero::Parameter& parameter : parameters.trainable) {
    const auto found = group_of.find(parameter.tensor.unsafeGetTensorImpl());
    groups.group_of.push_back(found == group_of.end() ? none : found->second);
    if (found == group_of.end() && absent.empty()) absent = parameter.name;
  }
  if (!absent.empty()) {
    groups.options.push_back({.lr = 0});
    log::info("initialize: .optimizer: has no ", absent, ", or more of the model: what is in none of its groups stays ",
              "as it is");
  }
  groups.masks.resize(groups.options.size());
  return groups;
}

std::shared_ptr<optimizers::SliceOptimizer> build_client_optimizer(const ModelState& model) {
  const std::shared_ptr<torch::optim::Optimizer>& client = model.optimizer.client;
  const int64_t steps = steps_before(*client, model.parameters, tensors_of(*client));
  const std::vector<optimizers::NamedStates> previous = previous_states(*client, model.parameters);
  const bool writes = std::any_of(previous.begin(), previous.end(), [](const auto& states) { return !states.empty(); });
  auto optimizer = std::make_shared<optimizers::ClientOptimizer>(
      client, *model.optimizer.client_states,
      [&previous](int parameter) { return previous[static_cast<size_t>(parameter)]; });
  add_slices(*optimizer, model, writes);
  optimizer->hold(steps);
  return optimizer;
}

}  // namespace ds::engine
