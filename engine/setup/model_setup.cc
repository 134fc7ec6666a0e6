#include "engine/setup/model_setup.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "config/plan/plan_choices.h"
#include "core/check.h"
#include "core/log.h"
#include "layers/compressed/compressed_model.h"
#include "model/state/autocast.h"
#include "model/state/gradient_compression.h"
#include "model/state/held_bytes.h"
#include "model/state/kept_buffers.h"
#include "model/state/part_options.h"
#include "model/state/row_wise.h"
#include "model/state/tensor_parts.h"
#include "optim/optimizer_table.h"
#include "zero/gather/parameter_publisher.h"

namespace ds::engine {
namespace {

void count_half(const zero::Parameter& parameter, DType dtype, std::vector<GivenDtype>& halves) {
  const auto is_same = [&](const GivenDtype& given) { return given.dtype == dtype; };
  auto found = std::find_if(halves.begin(), halves.end(), is_same);
  if (found == halves.end()) found = halves.insert(found, {.dtype = dtype, .first = parameter.name});
  ++found->count;
}

// Null where all stays on the device.
std::unique_ptr<OffloadedState> make_offloaded(const ModelState& model, const config::DsConfig& config,
                                               const ModelLayout& layout) {
  const zero::Offload& offload = model.plan.offload;
  if (offload.optimizer == zero::Home::kDevice && offload.parameters == zero::Home::kDevice) return nullptr;
  return std::make_unique<OffloadedState>(model.plan, config, offloaded_layout(model, layout, config.optimizer),
                                          *model.ranks.world);
}

// `widths`: of tables of embeddings (table_widths()).
GradientDeps make_gradients(const ModelState& model, const std::vector<int64_t>& widths) {
  const RankGroups& groups = model.ranks.groups;
  const at::Device device = model.ranks.device;
  GradientDeps parts;
  if (!model.buckets.empty())
    parts.reduction = make_gradient_reduction(model.plan, groups, model.buckets, model.infos, device);
  if (model.plan.sparse_gradients)
    parts.reduction = make_row_reduction(groups.compression.compressed, model.buckets, widths);
  if (model.plan.locate_non_finite) {
    parts.check = std::make_unique<zero::GradientCheck>(device, /*lazy=*/!device.is_cpu());
  }
  zero::ReducerOptions options = reducer_options(model.plan, model.module->name());
  if (!model.plan.sent_in_autocast.empty()) {
    for (const zero::ParameterBucket& bucket : model.buckets) {
      options.bucket_dtypes.push_back(
          static_cast<at::ScalarType>(bucket.layout().sent_as.value_or(static_cast<int>(at::ScalarType::Undefined))));
    }
  }
  parts.reducer = std::make_unique<zero::GradientReducer>(
      model.buckets, model.parameters,
      zero::ReduceRoutes{*groups.shards, groups.replicas.get(), parts.reduction.get(), model.host_gradients()},
      options);
  if (parts.check) parts.reducer->check_with(*parts.check);
  return parts;
}

// Returns the widths of tables whose rows travel alone; empty without sparse_gradients. The rows of row-wise tables do
// so without it.
std::vector<int64_t> widths_of_tables(const ModelState& model, const std::vector<int64_t>& row_widths) {
  if (!model.plan.sparse_gradients) return {};
  std::vector<int64_t> widths = table_widths(*model.module, model.parameters);
  const bool any = std::any_of(widths.begin(), widths.end(), [](int64_t width) { return width > 0; });
  if (!any && model.ranks.world->rank() == 0) {
    log::warning(
        "sparse_gradients: true has no effect: no trainable parameter is the weight of a torch::nn::Embedding, ",
        "of an EmbeddingBag, or of a layer named as one (wte, embed_tokens, ...); remove it, or rename the layer");
  }
  for (size_t i = 0; i < widths.size(); ++i) {
    if (row_widths[i] > 0) widths[i] = 0;
  }
  return widths;
}

// torch_autocast.lower_precision_safe_modules, whose names are looked at where nothing is sent, too.
void choose_listed(const ModelState& model, const config::TorchAutocastSection& section, BucketOptions& options) {
  if (!section.enabled || !section.lower_precision_safe_modules) return;
  const std::vector<std::string>& names = *section.lower_precision_safe_modules;
  auto tensors = tensors_of_classes(*model.module, names, "torch_autocast.lower_precision_safe_modules");
  if (model.plan.sent_in_autocast.empty()) return;
  if (tensors.empty() && model.ranks.world->rank() == 0) {
    log::warning("torch_autocast.lower_precision_safe_modules has no effect: no module of these classes has ",
                 "parameters of its own; all travel in ", name_of(model.plan.communication_dtype));
  }
  options.sent_as = scalar_type(*model.plan.autocast);
  options.sent_in_it = std::move(tensors);
}

// Of buffers that are cast to 16 bits: data_types.keep_in_fp32_modules, and sums of ours.
void choose_kept(const ModelState& model, const config::DataTypesSection& section, const ModelParameters& parameters,
                 BucketOptions& options) {
  if (!narrows_buffers(model.plan)) return;
  if (section.keep_in_fp32_modules) {
    options.float32_buffers = buffers_kept_in_float32(parameters, *section.keep_in_fp32_modules, model.ranks);
  }
  const auto compressed = model_compression::find_model(*model.module);
  if (!compressed) return;
  for (const at::Tensor& buffer : compressed->float32_buffers()) {
    options.float32_buffers.insert(buffer.unsafeGetTensorImpl());
  }
}

void make_access(ModelState& model) {
  const RankGroups& groups = model.ranks.groups;
  if (!model.plan.gather) {
    model.access =
        std::make_unique<zero::ParameterPublisher>(model.buckets, *groups.shards, model.plan.partition_optimizer);
    return;
  }
  std::vector<zero::ParameterBucket*> buckets;
  for (zero::ParameterBucket& bucket : model.buckets) buckets.push_back(&bucket);
  for (zero::ParameterBucket& bucket : model.frozen_buckets) buckets.push_back(&bucket);
  auto gatherer = std::make_unique<zero::ParameterGatherer>(
      buckets, zero::GatherRoutes{*groups.parameters, groups.node.get(), model.plan.weight_bits}, *model.plan.gather);
  model.gatherer = gatherer.get();
  model.access = std::move(gatherer);
  const bool any_table = std::any_of(model.buckets.begin(), model.buckets.end(),
                                     [](const auto& bucket) { return bucket.layout().row_width > 0; });
  if (any_table) model.row_tables = std::make_shared<RowTables>(model);
}

zero::StoredSlice stored_slice(const zero::ParameterBucket& bucket) {
  const int64_t bytes = bucket.kept_slice().stored_bytes();
  return {bucket.kept_slice().bits() > 0 ? bytes : bucket.layout().slice_numel, bytes};
}

// The buckets as they are.
void describe_buckets(const ModelState& model, zero::MemoryQuestion& question) {
  for (const zero::ParameterBucket& bucket : model.buckets) {
    question.buckets.push_back(bucket.layout().numel);
    question.persistent.push_back(bucket.layout().persistent ? 1 : 0);
    question.row_wise.push_back(bucket.layout().row_width > 0 ? 1 : 0);
  }
  question.frozen_bytes = frozen_bytes(model);
  for (const zero::ParameterBucket& bucket : model.frozen_buckets) {
    if (bucket.kept_slice().stored_bytes() > 0) question.frozen_slices.push_back(stored_slice(bucket));
  }
  for (const zero::ParameterBucket& bucket : model.frozen_buckets) {
    if (!bucket.sharded()) continue;
    question.frozen_elements += bucket.layout().numel;
    question.largest_frozen_bucket = std::max(question.largest_frozen_bucket, bucket.layout().numel);
  }
}

}  // namespace

void add_dtypes(const ModelParameters& parameters, PlanFacts& facts) {
  const zero::Parameter* other = nullptr;  // than float64
  int64_t float64 = 0;
  for (const auto* list : {&parameters.trainable, &parameters.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      ++facts.tensors;
      const at::ScalarType dtype = parameter.tensor.scalar_type();
      if (dtype == at::kDouble) {
        if (++float64 == 1) facts.first_float64 = parameter.name;
        continue;
      }
      if (!other) other = &parameter;
      if (dtype == at::kBFloat16) count_half(parameter, DType::kBFloat16, facts.halves);
      if (dtype == at::kHalf) count_half(parameter, DType::kFloat16, facts.halves);
    }
  }
  require(float64 == 0 || !other, "model: ", float64, " of ", facts.tensors,
          " parameters are float64 (first: ", facts.first_float64, "), others are not (",
          other ? other->name : std::string(), ": ", other ? other->tensor.scalar_type() : at::kDouble,
          "): an engine trains a model in one dtype. Convert it ",
          "before initialize(): model->to(torch::kDouble), which loses nothing, or model->to(torch::kFloat)");
}

void require_one_precision(const PlanFacts& facts, const Ranks& ranks) {
  const int64_t own = facts.first_float64.empty() ? 0 : 1;
  const bool same = same_number_on_all_ranks(own, ranks.device, *ranks.world, "float64 layers");
  require(same, "pipeline: layers of some stages are float64, those of others are not (here: ",
          own == 1 ? facts.first_float64 : std::string("none is"), "): an engine trains a model in one dtype; make ",
          "all layers float64, or none");
}

void lay_out_model(ModelState& model, const config::DsConfig& config, const ModelParameters& parameters,
                   const std::vector<int>& group_of, const std::vector<int64_t>& row_widths, StartValues& values) {
  model.parameters = parameters.trainable;
  model.infos = parameters.infos;
  model.frozen = parameters.frozen;
  comm::Communicator& shards = *model.ranks.groups.shards;
  BucketOptions options = bucket_options(model.plan, model.pipeline.get(), parameters);
  const std::vector<int64_t> widths = widths_of_tables(model, row_widths);
  if (model.plan.sparse_gradients) options.parts = parts_by_width(widths);
  lay_out_rows(row_widths, options);
  choose_listed(model, config.torch_autocast, options);
  choose_kept(model, config.data_types, parameters, options);
  ModelLayout layout = lay_out(parameters, group_of, options, shards.size());
  model.offloaded = make_offloaded(model, config, layout);
  BucketedModel built = build_buckets(parameters, std::move(layout), options, values, model.offloaded.get(), shards);
  model.buckets = std::move(built.buckets);
  model.frozen_buckets = std::move(built.frozen_buckets);
  model.masters = std::move(built.masters);
  if (model.pipeline) note_buckets(*model.pipeline, model.buckets, trained_tensor);
  model.axes = make_axes(model);
  model.gradients = make_gradients(model, widths);
  make_access(model);
}

void predict_exactly(ModelState& model, const config::DsConfig& config) {
  Plan& plan = model.plan;
  plan.parameters = 0;
  for (const ParameterInfo& info : model.infos) *plan.parameters += info.numel;
  zero::MemoryQuestion question = memory_question(config, plan, *plan.parameters);
  describe_buckets(model, question);
  plan.bytes = zero::predict_model_state(question);
  plan.step_bytes = zero::predict_step(question);
  plan.offloaded_bytes = zero::predict_offloaded(question);
  if (model.gradients.reduction) plan.compression_bytes = model.gradients.reduction->memory_bytes();
  // How much of a model is matrices, and what the program's optimizer keeps, is known only now.
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(plan.optimizer);
  const bool has_rest = row != nullptr && row->values_of_rest;
  if (!has_rest && !plan.error_feedback && !model.optimizer.client_states) return;
  plan.bytes->optimizer = device_state_bytes(model);
  plan.offloaded_bytes = model.offloaded_bytes();
}

}  // namespace ds::engine
