#include "engine/setup/row_wise_setup.h"

#include <torch/nn/modules/embedding.h>

#include <map>
#include <unordered_map>
#include <vector>

#include "core/check.h"
#include "core/listed.h"
#include "optim/client_states.h"
#include "optim/optimizer_table.h"

namespace ds::engine {
namespace {

// A dense table of so many elements is worth a warning.
constexpr int64_t kLargeTable = 1 << 20;
constexpr size_t kMostTablesNamed = 8;

// The options of a layer that reads a table.
struct SparseLayer {
  bool renorms = false;  // max_norm
};

// Returns the layers with sparse(true), by the identity of their weights.
std::unordered_map<const void*, SparseLayer> sparse_layers(const torch::nn::Module& module) {
  std::unordered_map<const void*, SparseLayer> layers;
  const auto add = [&](const at::Tensor& weight, const auto& options) {
    if (options.sparse()) layers[weight.unsafeGetTensorImpl()].renorms |= options.max_norm().has_value();
  };
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    if (const auto* embedding = layer->as<torch::nn::EmbeddingImpl>()) add(embedding->weight, embedding->options);
    if (const auto* bag = layer->as<torch::nn::EmbeddingBagImpl>()) add(bag->weight, bag->options);
  }
  return layers;
}

bool has_plain_gradients(const Plan& plan) {
  const bool wide = plan.model_dtype == DType::kFloat32 || plan.model_dtype == DType::kFloat64;
  return wide && !plan.separate_master && plan.master_dtype == plan.model_dtype &&
         plan.gradient_dtype == plan.model_dtype && plan.communication_dtype == plan.model_dtype;
}

// Returns why the optimizer cannot update rows; empty: it can.
std::string reason_of_optimizer(const ModelState& model) {
  const auto& client = model.optimizer.client;
  const std::string name = client ? optimizers::client_name(*client) : model.plan.optimizer;
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(name);
  const bool known = !client || optimizers::states_of_torch(*client);  // a class of the program's may have any name
  if (known && row != nullptr && row->updates_rows) return {};
  return cat(name, " moves rows that have no gradient; ",
             optimizers::optimizer_names([](const auto& one) { return one.updates_rows; }),
             " without momentum and weight decay leave them as they are");
}

// Returns why the rows of no table can be sharded at stage 3; empty: they can.
std::string reason_of_gathers(const Plan& plan) {
  if (plan.offload.parameters != zero::Home::kDevice) return "offload_param keeps slices that rows are not read from";
  if (plan.node_ranks > 1) return "zero_hpz_partition_size keeps parts of whole buckets in a node";
  if (plan.weight_bits > 0) return "zero_quantized_weights sends whole buckets in 8 bits";
  return {};
}

// Returns why no table of the model is row-wise; empty: they may be.
std::string reason_of_model(const ModelState& model) {
  const Plan& plan = model.plan;
  if (plan.gather) {
    const std::string reason = reason_of_gathers(plan);
    if (!reason.empty()) return reason;
  }
  if (plan.pipeline) return "the model is a pipeline";
  if (plan.topology.tensor > 1) return "tensor_parallel.autotp_size cuts the model";
  if (model.tensor) return "sequence_parallel_size cuts the batches of an unmodified model";
  if (plan.topology.dp != plan.shard_ranks) return "mics_shard_size keeps several copies of the model state";
  if (plan.offload.optimizer != zero::Home::kDevice) return "offload_optimizer updates whole slices on the host";
  if (!has_plain_gradients(plan)) return "weights, gradients and what is sent have to be all float32 or all float64";
  if (plan.compression.compresses() || plan.gradient_bits > 0) return "gradients are compressed";
  if (!plan.sent_in_autocast.empty()) return "torch_autocast.lower_precision_safe_modules sends gradients in 16 bits";
  if (!model.ranks.device.is_cpu() && !model.ranks.device.is_cuda()) return "the device is neither a CPU nor CUDA's";
  return reason_of_optimizer(model);
}

// Returns why one table is not row-wise where others may be; empty: it is.
std::string reason_of_table(const zero::Parameter& table, const SparseLayer& layer,
                            const optimizers::GroupOptions& group) {
  if (!table.other_names.empty()) return cat("tied to ", table.other_names.front());
  if (layer.renorms) return "max_norm changes rows in forward";
  if (table.tensor.dim() != 2 || table.tensor.numel() == 0) return "it has no rows";
  if (group.momentum != 0) return cat("momentum ", group.momentum, " moves rows that have no gradient");
  if (group.weight_decay != 0) return cat("weight_decay ", group.weight_decay, " moves rows that have no gradient");
  return {};
}

// Adds the rows of the plan. `reasons`: by reason, the tables that are not row-wise.
void tell(Plan& plan, const std::vector<std::string>& row_wise,
          const std::map<std::string, std::vector<std::string>>& reasons) {
  const char* const what = "sparse tables";
  if (!row_wise.empty()) {
    plan.rows.push_back(
        {what,
         cat(listed(row_wise, kMostTablesNamed), ": row-wise, ",
             plan.gather ? "sharded by rows, a lookup exchanges them, " : "", "a step costs the rows that it reads"),
         "sparse(true), and an optimizer that leaves other rows as they are"});
  }
  for (const auto& [reason, names] : reasons) {
    plan.rows.push_back({what, cat(listed(names, kMostTablesNamed), ": dense, a step costs the whole table"), reason});
  }
}

}  // namespace

std::vector<int64_t> choose_row_wise_tables(ModelState& model, const ModelParameters& parameters,
                                            const OptimizerGroups& groups) {
  std::vector<int64_t> widths(parameters.trainable.size(), 0);
  const std::unordered_map<const void*, SparseLayer> layers = sparse_layers(*model.module);
  if (layers.empty()) return widths;
  const std::string of_model = reason_of_model(model);
  std::vector<std::string> row_wise;
  std::map<std::string, std::vector<std::string>> reasons;
  for (size_t i = 0; i < parameters.trainable.size(); ++i) {
    const zero::Parameter& parameter = parameters.trainable[i];
    const auto layer = layers.find(parameter.tensor.unsafeGetTensorImpl());
    if (layer == layers.end()) continue;
    const auto group = static_cast<size_t>(groups.group_of[i]);
    const std::string reason =
        of_model.empty() ? reason_of_table(parameter, layer->second, groups.options.at(group)) : of_model;
    if (reason.empty()) {
      widths[i] = parameter.tensor.size(1);
      row_wise.push_back(parameter.name);
      continue;
    }
    require<ConfigError>(model.plan.optimizer != "SparseAdam", "optimizer.type: SparseAdam leaves rows without a ",
                         "gradient as they are, which needs row-wise tables; ", parameter.name, " is none: ", reason,
                         ". Use Adam, which updates all rows, or change what the reason names");
    reasons[reason].push_back(parameter.name);
    if (parameter.tensor.numel() < kLargeTable) continue;
    model.plan.warnings.push_back(
        cat("the sparse table ", parameter.name, " of ", parameter.tensor.size(0),
            " rows is updated as a dense parameter, which costs its whole size in each step: ", reason));
  }
  tell(model.plan, row_wise, reasons);
  return widths;
}

std::string row_wise_lines(const std::vector<int64_t>& widths, const ModelParameters& parameters) {
  std::string text;
  for (size_t i = 0; i < widths.size(); ++i) {
    if (widths[i] > 0) text += cat("the sparse table ", parameters.trainable[i].name, "\trow-wise\n");
  }
  return text;
}

}  // namespace ds::engine
