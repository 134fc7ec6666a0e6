#include "layers/compressed/small_model.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "layers/compressed/pruning.h"

namespace ds::model_compression {
namespace {

std::string member(const std::string& layer, const char* name) { return layer.empty() ? name : cat(layer, ".", name); }

// Whole tensors by name. A tied weight has several names and changes under all of them.
class State {
 public:
  explicit State(NamedTensors& values) : values_(values) {
    for (size_t i = 0; i < values_.size(); ++i) place_[values_[i].first] = i;
  }
  bool has(const std::string& name) const { return place_.contains(name); }
  const at::Tensor& get(const std::string& name) const {
    const auto found = place_.find(name);
    require(found != place_.end(), "redundancy_clean: expected the model to have ", name, ", found no such tensor");
    return values_[found->second].second;
  }
  // Returns all names of one tensor, this name among them.
  std::vector<std::string> names_of_same(const std::string& name) const {
    const at::Tensor& value = get(name);
    std::vector<std::string> result;
    for (const auto& [other, tensor] : values_) {
      const bool is_same = other == name || (tensor.numel() > 0 && tensor.data_ptr() == value.data_ptr() &&
                                             tensor.sizes() == value.sizes());
      if (is_same) result.push_back(other);
    }
    return result;
  }
  void put(const std::string& name, const at::Tensor& value) {
    for (const std::string& same : names_of_same(name)) values_[place_.at(same)].second = value;
  }
  // Keeps the entries of a dimension that `stays` (bool, one for each) names.
  void cut(const std::string& name, int64_t dim, const at::Tensor& stays) {
    const at::Tensor value = get(name);
    require(value.dim() > dim && value.size(dim) == stays.numel(), "redundancy_clean: expected ", name, " to have ",
            stays.numel(), " entries in dimension ", dim, ", of which ", stays.sum().item<int64_t>(),
            " stay, found a tensor ", value.sizes(),
            "; a layer can be a related one only of layers whose outputs it has, once for each dimension");
    const std::vector<std::string> names = names_of_same(name);
    require(names.size() == 1, "redundancy_clean: expected a tensor of its own for ", name,
            ", which loses dimensions, ", "found ", names.front(), " and ", names.back(),
            " to be one tensor; untie them, or take away related_modules");
    put(name, value.index_select(dim, stays.nonzero().view(-1).to(value.device())));
  }

 private:
  NamedTensors& values_;
  std::map<std::string, size_t> place_;
};

at::Tensor scores_of(const State& state, const CompressedLayer& layer, const Pruning& pruning) {
  return pruning.scores().defined() ? state.get(cat(member(layer.name(), kKeeper), ".", pruning.scores_name()))
                                    : at::Tensor();
}

// Requires that the layer was trained with what the small model gets.
void require_known(const State& state, const CompressedLayer& layer, bool any_used) {
  if (!layer.weight_quantization() && layer.prunings().empty()) return;
  require(
      layer.used() || !any_used, "redundancy_clean: expected ", member(layer.name(), "weight"), " to have been used ",
      "compressed, found that no operator linear, embedding or conv2d ever got it, as others did; leave the layer out ",
      "of modules, or hand the weight to one of them");
  const std::string bias = member(layer.name(), "bias");
  require(!layer.used() || !layer.changes_bias() || !state.has(bias) || layer.bias_used(),
          "redundancy_clean: expected ", bias,
          " to have been pruned with the outputs of its layer, found that no operator added it to their product as ",
          "linear, addmm or add_ do: the small model would compute something else; add the bias in one of these ways");
}

// By name.
using Finished = std::map<std::string, at::Tensor>;

void finish_values(const State& state, const CompressedLayer& layer, Finished& finished) {
  std::vector<at::Tensor> scores;
  for (const Pruning& pruning : layer.prunings()) {
    const Rule& rule = pruning.rule();
    require(layer.has_begun(rule), "redundancy_clean: expected a step from which on ", rule.path,
            " is in force, schedule_offset ", rule.schedule_offset, "; train further, or lower it");
    scores.push_back(scores_of(state, layer, pruning));
  }
  require(!layer.weight_quantization() || layer.has_begun(layer.weight_quantization()->rule()),
          "redundancy_clean: expected a step from ", "which on weight_quantization of ", layer.name(),
          " is in force; train further, or lower its schedule_offset");
  const std::string weight = member(layer.name(), "weight");
  const std::string bias = member(layer.name(), "bias");
  const Operands values = layer.final_values(
      {.weight = state.get(weight), .bias = state.has(bias) ? state.get(bias) : at::Tensor()}, scores);
  finished[weight] = values.weight;
  if (values.bias.defined()) finished[bias] = values.bias;
}

// A tied tensor is one in the small model, too.
void put_finished(State& state, const Finished& finished) {
  for (const auto& [name, value] : finished) {
    for (const std::string& other : state.names_of_same(name)) {
      const auto found = finished.find(other);
      const at::Tensor& expected = found == finished.end() ? state.get(other) : found->second;
      require(at::equal(value, expected), "redundancy_clean: expected one compression for ", name, " and ", other,
              ", which are one tensor, found different values; untie them or give both one rule");
    }
  }
  for (const auto& [name, value] : finished) state.put(name, value);
}

// Returns the entries that stay, where each entry of the mask stands for `block` entries, `times` times over.
at::Tensor kept_of(const at::Tensor& mask, int64_t block, int64_t times) {
  return mask.repeat_interleave(block).repeat({times});
}

void cut_outputs(State& state, const std::string& layer, const at::Tensor& kept) {
  state.cut(member(layer, "weight"), 0, kept);
  for (const char* name : {"bias", "running_mean", "running_var"}) {
    if (state.has(member(layer, name))) state.cut(member(layer, name), 0, kept);
  }
}

// Layers before attention: queries, keys and values, each apart or one after the other in one layer.
void cut_heads_before(State& state, const RelatedLayer& related, const at::Tensor& mask, int64_t hidden) {
  const at::Tensor& weight = state.get(member(related.name, "weight"));
  require(dynamic_cast<torch::nn::LinearImpl*>(related.module.get()) != nullptr && weight.size(0) % hidden == 0,
          "redundancy_clean: head_pruning: expected the related layer ", related.name, " to be a Linear with ", hidden,
          " outputs, or a multiple for queries, keys and values in one, found ", weight.size(0));
  cut_outputs(state, related.name, kept_of(mask, hidden / mask.numel(), weight.size(0) / hidden));
}

void cut_inputs(State& state, const RelatedLayer& related, Method method, const at::Tensor& mask) {
  if (dynamic_cast<torch::nn::BatchNorm2dImpl*>(related.module.get()) != nullptr) {
    return cut_outputs(state, related.name, kept_of(mask, 1, 1));
  }
  const std::string name = member(related.name, "weight");
  const int64_t inputs = state.get(name).size(1);
  const auto* const conv = dynamic_cast<torch::nn::Conv2dImpl*>(related.module.get());
  require(conv == nullptr || conv->options.groups() == 1, "redundancy_clean: expected the related layer ", related.name,
          " to have groups = 1, found ", conv == nullptr ? 0 : conv->options.groups());
  // A Linear after flatten() sees each channel as many times as it has pixels.
  const bool may_repeat = conv == nullptr && method == Method::kChannelPruning;
  require(may_repeat ? inputs % mask.numel() == 0 : inputs == mask.numel(), "redundancy_clean: expected the related ",
          "layer ", related.name, " to have an input for each of ", mask.numel(), " outputs, found ", inputs);
  state.cut(name, 1, kept_of(mask, inputs / mask.numel(), 1));
}

void cut_dimensions(State& state, const Cut& cut, const at::Tensor& mask) {
  const std::string& name = cut.layer->name();
  if (cut.method == Method::kHeadPruning) {
    const int64_t hidden = cut.layer->weight().size(1);
    for (const RelatedLayer& related : cut.related) cut_heads_before(state, related, mask, hidden);
    return state.cut(member(name, "weight"), 1, kept_of(mask, hidden / mask.numel(), 1));
  }
  for (const RelatedLayer& related : cut.related) cut_inputs(state, related, cut.method, mask);
  cut_outputs(state, name, kept_of(mask, 1, 1));
}

void follow_sizes(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
    linear->options.out_features(linear->weight.size(0)).in_features(linear->weight.size(1));
  } else if (auto* conv = dynamic_cast<torch::nn::Conv2dImpl*>(&module)) {
    conv->options.out_channels(conv->weight.size(0)).in_channels(conv->weight.size(1) * conv->options.groups());
  } else if (auto* norm = dynamic_cast<torch::nn::BatchNorm2dImpl*>(&module)) {
    if (norm->weight.defined()) norm->options.num_features(norm->weight.size(0));
  }
}

constexpr const char* kPath = "compression_training.layer_reduction";

std::shared_ptr<torch::nn::Module> find_module(torch::nn::Module& model, const std::string& name, const char* whose,
                                               const char* key) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  const auto* const found = modules.find(name);
  require<ConfigError>(found != nullptr, kPath, ".", key, ": expected the ", whose, " to have a module ", name,
                       ", found none");
  return *found;
}

// The tensors to copy: from the teacher's to the student's.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

void add_copies(Copies& copies, torch::nn::Module& student, torch::nn::Module& teacher, const std::string& name) {
  const auto add = [&](const auto& to, const auto& from) {
    for (const auto& item : to) {
      const at::Tensor* const source = from.find(item.key());
      require<ConfigError>(source != nullptr && source->sizes() == item.value().sizes(), kPath, ": expected ", name,
                           ".", item.key(), " of the shape ", item.value().sizes(), " in the teacher, found ",
                           lazy([&] { return source == nullptr ? "none" : cat(source->sizes()); }));
      copies.emplace_back(*source, item.value());
    }
  };
  add(student.named_parameters(), teacher.named_parameters());
  add(student.named_buffers(), teacher.named_buffers());
}

}  // namespace

NamedTensors small_state(const CompressedModel& model, NamedTensors values) {
  const at::NoGradGuard no_grad;
  State state(values);
  std::vector<std::pair<const Cut*, at::Tensor>> masks;  // of the whole scores, before anything is cut
  for (const Cut& cut : model.cuts()) {
    for (const Pruning& pruning : cut.layer->prunings()) {
      if (pruning.rule().method != cut.method) continue;
      masks.emplace_back(&cut, pruning.final_mask(scores_of(state, *cut.layer, pruning)).to(at::kCPU));
    }
  }
  const bool any_used =
      std::any_of(model.layers().begin(), model.layers().end(), [](const auto& layer) { return layer->used(); });
  require(!model.masks_are_due(),
          "redundancy_clean: expected a step that was applied, by whose gradients snip_momentum ",
          "chooses what leaves, found none; train further");
  Finished finished;  // all from the trained values
  for (const auto& layer : model.layers()) {
    require_known(state, *layer, any_used);
    finish_values(state, *layer, finished);
  }
  put_finished(state, finished);
  for (const auto& [cut, mask] : masks) cut_dimensions(state, *cut, mask);
  std::erase_if(values, [&](const auto& item) {
    return std::any_of(model.layers().begin(), model.layers().end(),
                       [&](const auto& layer) { return item.first.starts_with(member(layer->name(), kKeeper) + "."); });
  });
  return values;
}

void take_state(torch::nn::Module& module, const NamedTensors& state) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> wanted(state.begin(), state.end());
  std::vector<std::pair<at::Tensor, at::Tensor>> changes;
  const auto match = [&](const std::string& name, const at::Tensor& tensor) {
    const auto found = wanted.find(name);
    require(found != wanted.end(), "load_small_model: expected a value for ", name, ", found none");
    changes.emplace_back(tensor, found->second);
  };
  for (const auto& item : module.named_parameters()) match(item.key(), item.value());
  for (const auto& item : module.named_buffers()) match(item.key(), item.value());
  for (auto& [tensor, value] : changes) {
    tensor.mutable_grad() = at::Tensor();
    tensor.set_data(value.to(tensor.options()).clone());
  }
  for (const auto& part : module.modules(/*include_self=*/true)) follow_sizes(*part);
}

void drop_method_tensors(const CompressedModel& model) {
  for (const auto& layer : model.layers()) {
    const auto module = layer->module();
    if (!module) continue;
    if (module->named_children().contains(kKeeper)) module->unregister_module(kKeeper);
  }
}

void reduce_layers(torch::nn::Module& student, torch::nn::Module& teacher, const LayerReduction& reduction) {
  const auto count = static_cast<int64_t>(reduction.teacher_layers.size());
  require<ConfigError>(count > 0 && !reduction.prefix.empty(), kPath,
                       ": expected module_name_prefix and at least one teacher_layer");
  require<ConfigError>(reduction.kept_layers.value_or(count) == count, kPath,
                       ".keep_number_layer: expected as many as ", "teacher_layer has entries, ", count, ", found ",
                       reduction.kept_layers.value_or(count));
  const auto own = find_module(student, reduction.prefix, "student", "module_name_prefix");
  const auto layers = static_cast<int64_t>(own->children().size());
  require<ConfigError>(layers == count, kPath, ".teacher_layer: expected an entry for each of the student's ", layers,
                       " layers in ", reduction.prefix, ", found ", count);
  Copies copies;
  for (int64_t i = 0; i < count; ++i) {
    const std::string to = cat(reduction.prefix, ".", i);
    const std::string from = cat(reduction.prefix, ".", reduction.teacher_layers[static_cast<size_t>(i)]);
    const auto own_layer = find_module(student, to, "student", "module_name_prefix");
    add_copies(copies, *own_layer, *find_module(teacher, from, "teacher", "teacher_layer"), from);
  }
  for (const std::string& name : reduction.other_modules) {
    const auto own_module = find_module(student, name, "student", "other_module_name");
    add_copies(copies, *own_module, *find_module(teacher, name, "teacher", "other_module_name"), name);
  }
  const at::NoGradGuard no_grad;
  for (auto& [from, to] : copies) at::Tensor(to).copy_(from);
}

}  // namespace ds::model_compression
