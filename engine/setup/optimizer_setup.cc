#include "engine/setup/optimizer_setup.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "comm/agreement.h"
#include "compression/compressed_factory.h"
#include "config/split/layer_names.h"
#include "core/check.h"
#include "core/name_pattern.h"
#include "core/split/split_tensor.h"
#include "core/text_hash.h"
#include "core/text_lines.h"
#include "model/state/part_options.h"
#include "model/state/tensor_parts.h"
#include "optim/muon.h"
#include "optim/optimizer_factory.h"
#include "zero/partition.h"
#include "zero/slice_exchange.h"

namespace ds::engine {
namespace {

optimizers::GroupOptions overridden(optimizers::GroupOptions base, const ParameterGroup& group) {
  if (group.lr) base.lr = *group.lr;
  if (group.weight_decay) base.weight_decay = *group.weight_decay;
  base.non_freeze = group.non_freeze;
  return base;
}

// The name of a parameter by which a group has it, and the pattern that says so.
struct Claim {
  std::string name;
  std::string pattern;
};

// The result of assign_groups().
struct Assignment {
  std::vector<int> group_of;      // 0 for the config's values, i + 1 for groups[i]
  std::set<std::string> unfound;  // names that match nothing, with their group: "parameter_groups[0]: \"h.*\""
};

// Returns the group of each trainable parameter. In the names of a group '*' stands for any text; a tied parameter is
// meant by any of its names. Throws UsageError when two groups claim a parameter.
Assignment assign_groups(const std::vector<zero::Parameter>& parameters, const std::vector<ParameterGroup>& groups) {
  Assignment assignment;
  std::vector<int>& result = assignment.group_of;
  result.assign(parameters.size(), 0);
  std::vector<Claim> claims(parameters.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& pattern : groups[g].parameters) {
      const NamePattern wanted = NamePattern::stars(pattern);
      bool found = false;
      for (size_t i = 0; i < parameters.size(); ++i) {
        const std::string* const name = parameters[i].name_that([&](const auto& one) { return wanted.matches(one); });
        if (name == nullptr) continue;
        found = true;
        const int group = static_cast<int>(g) + 1;
        const bool tied = result[i] != 0 && claims[i].name != *name;
        require(result[i] == 0 || result[i] == group, "parameter_groups: parameter ", claims[i].name, " is in group ",
                result[i] - 1, ", by \"", claims[i].pattern, "\", and ", tied ? "as " : "",
                tied ? *name : std::string(), tied ? ", which is the same tensor, " : "", "in group ", g, ", by \"",
                pattern, "\"; expected one group for a tensor",
                tied ? ": name it by one of its names in one group alone" : "");
        result[i] = group;
        claims[i] = {.name = *name, .pattern = pattern};
      }
      if (!found) assignment.unfound.insert(cat("parameter_groups[", g, "]: \"", pattern, "\""));
    }
  }
  return assignment;
}

// Throws UsageError for a name that matches no parameter of any rank of the pipeline, on all of them with one text.
// Collective over all ranks, also where `failure` is not null, which is thrown.
void require_found_somewhere(const Assignment& assignment, const std::vector<zero::Parameter>& parameters,
                             const Ranks& ranks, const std::exception_ptr& failure) {
  const int failed = comm::failed_rank(failure, ranks.device, *ranks.world);
  require(failed < 0, "initialize: .parameter_groups: rank ", failed, " refuses them; its message says why");
  std::string own = parameters.empty() ? "" : parameters.front().name;
  for (const std::string& name : assignment.unfound) own += '\n' + name;
  std::string example;
  std::set<std::string> nowhere = assignment.unfound;
  for (const std::string& text : comm::texts_of_ranks(own, ranks.device, *ranks.world, "names of parameter groups")) {
    const std::vector<std::string> lines = text_lines(text);
    if (example.empty() && !lines.empty()) example = lines.front();
    const std::set<std::string> of_rank(lines.begin(), lines.end());
    std::erase_if(nowhere, [&](const std::string& name) { return !of_rank.contains(name); });
  }
  if (nowhere.empty()) return;
  throw UsageError(
      cat(*nowhere.begin(), " matches no trainable parameter of any stage; names look like \"", example, "\""));
}

// Gives the optimizer the mask of each group as flat masks of the group's buckets.
void set_average_masks(compression::CompressedOptimizer& optimizer, const std::vector<at::Tensor>& masks,
                       const std::vector<zero::ParameterBucket>& buckets,
                       const std::vector<zero::Parameter>& parameters) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    const zero::BucketLayout& layout = buckets[b].layout();
    const at::Tensor& mask = masks[static_cast<size_t>(layout.group)];
    if (!mask.defined()) continue;
    const at::Tensor flat = at::ones({layout.numel}, buckets[b].flat().options().dtype(at::kBool));
    for (const Segment& segment : layout.segments) {
      const zero::Parameter& parameter = parameters[static_cast<size_t>(segment.parameter)];
      const TensorPart* const part = parameter.part.get();
      const c10::IntArrayRef sizes = part ? c10::IntArrayRef(part->whole_sizes()) : parameter.tensor.sizes();
      require(at::is_expandable_to(mask.sizes(), sizes), "initialize: .parameter_groups: exp_avg_mask of shape ",
              mask.sizes(), " does not broadcast to ", parameter.name, " of shape ", sizes,
              "; give that parameter a group of its own");
      const at::Tensor expanded = mask.ne(0).expand(sizes);
      const at::Tensor own = (part ? slice_of(expanded, *part) : expanded).reshape({-1});
      flat.narrow(0, segment.slice_offset, segment.length)
          .copy_(own.narrow(0, segment.parameter_offset, segment.length));
    }
    optimizer.set_average_mask(static_cast<int64_t>(b), flat);
  }
}

// Requires buckets with the same parameters on all ranks of the tensor axis, for optimizers that exchange sums or
// matrices by buckets (Lamb, Muon).
void require_alike_over_axis(const ModelState& model, const std::string& type) {
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(type);
  if (model.plan.topology.tensor == 1 || row == nullptr || row->elementwise) return;
  std::string text;
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    if (!model.is_part(b)) continue;
    const zero::BucketLayout& layout = model.buckets[b].layout();
    const int rank = model.plan.partition_optimizer ? model.ranks.groups.shards->rank() : 0;
    for (const Segment& segment : layout.segments) text += cat(segment.parameter, ' ');
    text += '/';
    for (const Segment& segment : zero::slice_segments(layout, rank)) text += cat(segment.parameter, ' ');
    text += '\n';
  }
  const auto hash = static_cast<int64_t>(fnv1a(text) >> 1);  // not negative
  const bool same = same_number_on_all_ranks(hash, model.ranks.device, *model.tensor->ranks, "buckets of parts");
  require<ConfigError>(same, "optimizer.type: ", type, " with tensor_parallel.autotp_size ",
                       model.tensor->ranks->size(), " needs parts of one size on all ranks of the axis, found uneven ",
                       "ones, which lie in other buckets or slices on each. Keep what does not divide whole (a rule ",
                       "with Style::kWhole), or use ", optimizers::optimizer_names(optimizers::updates_alone));
}

std::vector<int64_t> rows_by_name(const std::vector<zero::Parameter>& parameters, int64_t head_dim) {
  std::vector<int64_t> rows;
  for (const zero::Parameter& parameter : parameters) {
    const std::vector<int64_t> sizes = parameter.whole_sizes();
    const bool heads = sizes.size() == 2 && parameter.name_that(makes_heads) != nullptr;
    require<ConfigError>(!heads || sizes[0] % head_dim == 0, "optimizer.params.per_head_muon: ", parameter.name,
                         ": expected whole heads of optimizer.params.head_dim ", head_dim, " rows, found ", sizes[0],
                         " rows; correct head_dim, or set per_head_muon to false");
    rows.push_back(heads ? head_dim : 0);
  }
  return rows;
}

// The rows of each parameter that are one head's, for per_head_muon: `head_dim` in weights of queries, keys and values,
// told by their names (makes_heads()); 0: the matrix is one. Collective over all ranks. Throws ConfigError, on all of
// them, for such a weight whose rows `head_dim` does not divide, and where no rank has one.
std::vector<int64_t> head_rows(const std::vector<zero::Parameter>& parameters, int64_t head_dim, const Ranks& ranks) {
  std::vector<int64_t> rows;
  std::exception_ptr failure;
  try {
    rows = rows_by_name(parameters, head_dim);
  } catch (const ConfigError&) {
    failure = std::current_exception();
  }
  const int failed = failed_rank(failure, ranks.device, *ranks.world);
  require<ConfigError>(failed < 0, "optimizer.params.per_head_muon: rank ", failed, " has a weight whose rows ",
                       "optimizer.params.head_dim ", head_dim, " does not divide, which it names");
  const auto found = static_cast<int64_t>(rows.size()) - std::count(rows.begin(), rows.end(), 0);
  require<ConfigError>(largest_of_ranks(found, ranks.device, *ranks.world, "weights of heads") > 0,
                       "optimizer.params.per_head_muon: expected weights of queries, keys or values in layers named ",
                       "q_proj, k_proj, v_proj, query, key, value, wq, wk, wv, qkv, qkv_proj, query_key_value or ",
                       "Wqkv, or torch::nn::MultiheadAttention's, found none; rename the layers, or set it to false");
  return rows;
}

}  // namespace

void add_slices(optimizers::SliceOptimizer& optimizer, const ModelState& model, bool writes) {
  const bool partition = model.plan.partition_optimizer;
  comm::Communicator& shards = *model.ranks.groups.shards;
  const auto exchange =
      partition && shards.size() > 1 ? zero::make_slice_exchange(shards) : zero::make_whole_exchange();
  std::shared_ptr<optimizers::SliceExchange> sums;
  std::shared_ptr<optimizers::PartExchange> parts;
  if (model.tensor && !model.tensor->cuts_batches) {
    sums = make_part_sums(exchange, *model.tensor);
    parts = make_part_exchange(*model.tensor, model.parameters);
  }
  optimizer.set_state_dtype(scalar_type(model.plan.state_dtype));
  const optimizers::StateMemory memory = model.offloaded ? model.offloaded->state_memory() : optimizers::StateMemory();
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    const zero::BucketLayout& layout = model.buckets[b].layout();
    const int rank = partition ? shards.rank() : 0;
    const auto add = [&] {
      optimizer.add_slice({.master = model.masters[b],
                           .group = layout.group,
                           .bucket_offset = rank * layout.slice_numel,
                           .segments = zero::slice_segments(layout, rank),
                           .bucket_segments = layout.segments,
                           .parameters = &model.infos,
                           .exchange = model.is_part(b) ? sums : exchange,
                           .parts = model.is_part(b) ? parts : nullptr,
                           .row_width = layout.row_width},
                          memory);
    };
    if (writes) {
      model.use_master(b, /*changes=*/true, [&](const at::Tensor&) { add(); });
    } else {
      add();
    }
  }
}

std::string group_lines(const std::vector<optimizers::GroupOptions>& groups) {
  std::string text;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto add = [&](const char* what, const auto& value) {
      text += cat(what, " of parameter group ", g, '\t', value, '\n');
    };
    add("lr", groups[g].lr);
    add("weight_decay", groups[g].weight_decay);
    add("non_freeze", groups[g].non_freeze);
  }
  return text;
}

OptimizerGroups plan_groups(const config::OptimizerSection& section, const ModelParameters& parameters,
                            const std::vector<ParameterGroup>& groups, const Ranks* stages) {
  OptimizerGroups result;
  Assignment assignment;
  std::exception_ptr failure;
  try {
    assignment = assign_groups(parameters.trainable, groups);
  } catch (const UsageError&) {
    if (stages == nullptr) throw;
    failure = std::current_exception();
  }
  if (stages != nullptr) {
    require_found_somewhere(assignment, parameters.trainable, *stages, failure);
  } else {
    require(assignment.unfound.empty(), lazy([&] { return *assignment.unfound.begin(); }),
            " matches no trainable parameter; names look like \"",
            lazy([&] { return parameters.trainable.front().name; }), "\"");
  }
  result.group_of = std::move(assignment.group_of);
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(section.type);
  optimizers::GroupOptions base = optimizers::group_options(section.values);
  if (section.values.muon_lr) base.lr = *section.values.muon_lr;
  result.options.push_back(base);
  for (const ParameterGroup& group : groups) result.options.push_back(overridden(base, group));
  result.masks.resize(1);
  for (const ParameterGroup& group : groups) {
    require(section.compresses() || (!group.non_freeze && !group.exp_avg_mask.defined()),
            "initialize: .parameter_groups: ", "non_freeze and exp_avg_mask are for ",
            optimizers::optimizer_names([](const optimizers::OptimizerDescription& one) { return one.compresses; }),
            ", found optimizer.type ", section.type);
    require(!group.non_freeze || (row != nullptr && row->has_frozen_groups),
            "initialize: .parameter_groups: ", "non_freeze is for ",
            optimizers::optimizer_names([](const auto& one) { return one.has_frozen_groups; }),
            ", found optimizer.type ", section.type);
    result.masks.push_back(group.exp_avg_mask);
  }
  if (row == nullptr || !row->values_of_rest) return result;

  // The second half of the groups belongs to the parameters that Muon leaves to AdamW.
  const auto own_groups = static_cast<int>(result.options.size());
  optimizers::GroupOptions aux = *row->values_of_rest;
  aux.weight_decay = section.values.weight_decay;
  if (section.params.contains("lr")) aux.lr = section.values.lr;
  if (section.values.adam_lr) aux.lr = *section.values.adam_lr;
  result.options.push_back(aux);
  for (const ParameterGroup& group : groups) result.options.push_back(overridden(aux, group));
  for (size_t i = 0; i < parameters.infos.size(); ++i) {
    if (!optimizers::uses_muon(parameters.infos[i])) result.group_of[i] += own_groups;
  }
  return result;
}

std::shared_ptr<optimizers::SliceOptimizer> build_optimizer(const ModelState& model,
                                                            const config::OptimizerSection& section,
                                                            const OptimizerGroups& groups) {
  require_alike_over_axis(model, section.type);
  optimizers::OptimizerOptions options = {
      .type = section.algorithm(), .groups = groups.options, .values = section.values};
  if (section.values.per_head_muon) {
    options.block_rows = head_rows(model.parameters, section.values.head_dim, model.ranks);
  }
  std::shared_ptr<compression::CompressedOptimizer> compressed;
  if (section.compresses()) {
    compressed = compression::make_compressed_optimizer(options, *model.ranks.groups.shards);
  }
  std::shared_ptr<optimizers::SliceOptimizer> optimizer = compressed;
  if (!optimizer) optimizer = optimizers::make_optimizer(options);
  // Only one that begins with other states than zeros touches them.
  add_slices(*optimizer, model, /*writes=*/section.values.initial_accumulator_value != 0);
  if (compressed) set_average_masks(*compressed, groups.masks, model.buckets, model.parameters);
  return optimizer;
}

}  // namespace ds::engine
