#include "layers/compressed/layer_reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"

namespace ds::model_compression {
namespace {

constexpr const char* kPath = "compression_training.layer_reduction";

std::shared_ptr<torch::nn::Module> find_module(torch::nn::Module& model, const std::string& name, const char* whose,
                                               const char* key) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  const auto* const found = modules.find(name);
  require<ConfigError>(found != nullptr, kPath, ".", key, ": expected the ", whose, " to have a module ", name,
                       ", found none");
  return *found;
}

// What is copied: from the teacher's to the student's.
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
