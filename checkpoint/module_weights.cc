#include "checkpoint/module_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/listed.h"

namespace ds::checkpoint {
namespace {

constexpr size_t kNamed = 8;  // in a message

void append_names(std::string& text, const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return;
  text += cat(text.empty() ? "" : "; ", names.size(), " ", title, ": ", listed(names, kNamed));
}

bool of_model(const std::string& path) { return path.starts_with("weights/") || path.starts_with("buffers/"); }

}  // namespace

std::string weight_for(const Source& source, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (source.contains(weight_path(name))) return weight_path(name);
    const auto alias = source.aliases().find(name);
    if (alias != source.aliases().end() && source.contains(weight_path(alias->second))) {
      return weight_path(alias->second);
    }
  }
  return {};
}

void add_stored_names(Source& source, const std::vector<std::string>& names, const std::vector<int64_t>& sizes,
                      std::map<std::string, std::vector<int64_t>>& wanted) {
  const std::string chosen = weight_for(source, names);
  for (const std::string& name : names) {
    const std::string path = weight_path(name);
    if (path == chosen || !source.contains(path) || source.info(path).sizes != sizes) continue;
    if (at::equal(source.tensor(path), source.tensor(chosen))) wanted[path] = sizes;
  }
}

std::string Difference::text() const {
  std::string text;
  append_names(text, "missing in the checkpoint", missing);
  append_names(text, "that the model does not have", unused);
  return text;
}

Difference difference(const Source& source, const std::map<std::string, std::vector<int64_t>>& wanted) {
  Difference result;
  for (const auto& [path, sizes] : wanted) {
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();  // nothing to load
    if (!empty && !source.contains(path)) result.missing.push_back(path);
  }
  for (const auto& [path, tensor] : source.tensors()) {
    if (of_model(path) && !wanted.contains(path)) result.unused.push_back(path);
  }
  return result;
}

void require_shapes(const Source& source, const std::map<std::string, std::vector<int64_t>>& wanted) {
  for (const auto& [path, sizes] : wanted) {
    if (!source.contains(path)) continue;
    const std::vector<int64_t>& found = source.info(path).sizes;
    require(found == sizes, source.location(), ": \"", path, "\": the model has shape ", c10::IntArrayRef(sizes),
            ", the checkpoint ", c10::IntArrayRef(found));
  }
}

void load_module(Source& source, torch::nn::Module& module, bool strict) {
  const at::NoGradGuard no_grad;
  std::map<const void*, std::vector<std::string>> names;
  for (const auto& item : module.named_parameters()) names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  std::map<std::string, std::vector<int64_t>> wanted;
  std::vector<std::pair<std::string, at::Tensor>> targets;
  const auto add = [&](const std::string& path, const at::Tensor& tensor) {
    wanted.emplace(path, tensor.sizes().vec());
    if (source.contains(path)) targets.emplace_back(path, tensor.detach());
  };
  for (const auto& item : module.named_parameters()) {
    const std::vector<std::string>& all = names.at(item.value().unsafeGetTensorImpl());
    if (all.front() != item.key()) continue;
    const std::string path = weight_for(source, all);
    add(path.empty() ? weight_path(item.key()) : path, item.value());
    add_stored_names(source, all, item.value().sizes().vec(), wanted);
  }
  for (const auto& item : module.named_buffers()) {
    // Files of weights do not tell the two apart.
    const bool as_weight = !source.contains(buffer_path(item.key())) && source.contains(weight_path(item.key()));
    add(as_weight ? weight_path(item.key()) : buffer_path(item.key()), item.value());
  }
  require_shapes(source, wanted);
  const Difference differs = difference(source, wanted);
  require(!strict || differs.empty(), source.location(), ": the checkpoint does not fit the model: ", differs.text(),
          ". Load it with strict = false to take what both have");
  for (const auto& [path, target] : targets) {
    const bool direct = target.is_cpu() && target.is_contiguous();
    const at::Tensor values = direct ? target : at::empty(target.sizes(), target.scalar_type());
    source.read(path, 0, values);
    if (!direct) at::Tensor(target).copy_(values);
  }
}

}  // namespace ds::checkpoint
