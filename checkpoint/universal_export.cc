#include "checkpoint/export.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "checkpoint/source/training_state.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/system_call.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using c10::IValue;
using nlohmann::json;
using PythonDict = c10::impl::GenericDict;
using PythonList = c10::impl::GenericList;

constexpr const char* kDeepSpeedVersion = "0.19.8";  // whose layout this is; its loader wants a version
constexpr const char* kLatestUniversal = "latest_universal";
constexpr const char* kOptimizerState = "optimizer_state.pt";

PythonDict python_dict() { return PythonDict(c10::StringType::get(), c10::AnyType::get()); }
PythonList python_list() { return PythonList(c10::AnyType::get()); }

IValue to_python(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    PythonList list = python_list();
    for (const json& item : value) list.push_back(to_python(item));
    return list;
  }
  if (!value.is_object()) return {};
  PythonDict dict = python_dict();
  for (const auto& [key, item] : value.items()) dict.insert(key, to_python(item));
  return dict;
}

void save(const fs::path& path, const IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  write_whole_file(path.string(), {bytes.data(), bytes.size()});
}

// torch's Adam counts in a float32 tensor, DeepSpeed's in an int.
IValue step_for(const TrainingState& state) {
  const json params = state.config.value(json::json_pointer("/optimizer/params"), json::object());
  if (!params.value("torch_adam", false)) return state.optimizer->step_count;
  return at::scalar_tensor(static_cast<double>(state.optimizer->step_count), at::kFloat);
}

// Under the names of DeepSpeed's schedules, and of torch's ReduceLROnPlateau.
IValue schedule_of(const TrainingState& state) {
  if (!state.lr_iteration) return {};
  PythonDict result = python_dict();
  result.insert("last_batch_iteration", *state.lr_iteration);
  if (!state.plateau) return result;
  const optimizers::PlateauState& plateau = *state.plateau;
  if (plateau.best) result.insert("best", *plateau.best);
  result.insert("num_bad_epochs", plateau.bad_values);
  result.insert("cooldown_counter", plateau.cooldown);
  result.insert("last_epoch", plateau.values);
  return result;
}

PythonDict groups_of(const TrainingState& state, const PythonDict& optimizer) {
  PythonList groups = python_list();
  for (const optimizers::GroupOptions& group : state.optimizer->groups) {
    PythonDict entry = python_dict();
    entry.insert("lr", group.lr);
    entry.insert("betas", c10::ivalue::Tuple::create({IValue(group.beta1), IValue(group.beta2)}));
    entry.insert("eps", group.eps);
    entry.insert("weight_decay", group.weight_decay);
    entry.insert("params", python_list());
    groups.push_back(entry);
  }
  optimizer.insert("param_groups", groups);
  return optimizer;
}

IValue optimizer_state(const TrainingState& state) {
  PythonDict first = python_dict();
  first.insert("step", step_for(state));
  PythonDict states(c10::IntType::get(), c10::AnyType::get());
  states.insert(int64_t{0}, first);
  PythonDict stage_3 = groups_of(state, python_dict());
  stage_3.insert("state", states);
  PythonDict result = groups_of(state, python_dict());
  result.insert("optimizer_state_dict", stage_3);
  result.insert("ds_version", kDeepSpeedVersion);
  return result;
}

IValue model_states(Source& source) {
  const TrainingState& state = source.state();
  PythonDict result = python_dict();
  if (state.client_state.is_object()) {
    for (const auto& [key, value] : state.client_state.items()) result.insert(key, to_python(value));
  }
  PythonDict module = python_dict();
  for (const auto& [path, info] : source.tensors()) {
    const std::string buffer = name_in("buffers/", path);
    if (!buffer.empty()) module.insert(buffer, source.tensor(path));
    if (info.frozen) module.insert(name_in("weights/", path), source.tensor(path));
  }
  result.insert_or_assign("module", module);
  result.insert_or_assign("global_steps", state.global_steps);
  result.insert_or_assign("global_samples", state.global_samples);
  result.insert_or_assign("skipped_steps", state.skipped_steps);
  result.insert_or_assign("dp_world_size", int64_t{state.world_size});
  result.insert_or_assign("mp_world_size", int64_t{1});
  result.insert_or_assign("ds_version", kDeepSpeedVersion);
  result.insert_or_assign("ds_config", to_python(state.config));
  result.insert_or_assign("lr_scheduler", schedule_of(state));
  return result;
}

void save_parameter(Source& source, const std::string& name, const fs::path& folder) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  require<IoError>(!failure, folder.native(), ": cannot make this folder: ", SystemReason(failure));
  const auto save_tensor = [&](const char* file, const std::string& path) {
    const TensorInfo& info = source.info(path);
    const at::Tensor value = at::empty(info.sizes, info.dtype == at::kDouble ? at::kDouble : at::kFloat);
    source.read(path, 0, value);
    PythonDict entry = python_dict();
    entry.insert("param", value);
    save(folder / file, entry);
  };
  save_tensor("fp32.pt", weight_path(name));
  save_tensor("exp_avg.pt", state_path("exp_avg", name));
  save_tensor("exp_avg_sq.pt", state_path("exp_avg_sq", name));
  save(folder / "step.pt", step_for(source.state()));
}

// Names of trained parameters.
std::vector<std::string> trained(const Source& source) {
  const std::string where = cat(source.location(), ": DeepSpeed's universal layout is written for Adam and AdamW; ");
  require(source.state().optimizer.has_value(), where, "expected an optimizer's state, found weights only");
  std::vector<std::string> names;
  for (const auto& [path, info] : source.tensors()) {
    const bool other = path.starts_with("optimizer/") && !path.starts_with("optimizer/exp_avg/") &&
                       !path.starts_with("optimizer/exp_avg_sq/");
    require(!other, where, "found \"", path, "\" of ", source.state().optimizer->type);
    const std::string name = name_in("weights/", path);
    if (name.empty() || info.frozen) continue;
    // Each becomes a folder: a name from elsewhere must not reach outside of the export.
    require(name.find('/') == std::string::npos && name != "." && name != ".." && name != kOptimizerState, where,
            "the parameter \"", name, "\" cannot be the name of a folder there");
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      require(source.contains(state_path(state, name)), where, "expected \"", state_path(state, name), "\" of ",
              source.state().optimizer->type, ", found none");
    }
    names.push_back(name);
  }
  return names;
}

}  // namespace

void export_universal(Source& source, const std::string& folder) {
  const std::vector<std::string> names = trained(source);
  const fs::path path = fs::absolute(folder).lexically_normal();
  const std::string save_dir = path.parent_path().string();
  const std::string tag = path.filename().string();
  const TagSave target = new_save(save_dir, tag);
  begin_tag(target);
  try {
    const fs::path incomplete = target.incomplete;
    for (const std::string& name : names) save_parameter(source, name, incomplete / "zero" / name);
    save(incomplete / "zero" / kOptimizerState, optimizer_state(source.state()));
    const IValue states = model_states(source);
    for (const char* file : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}) {
      save(incomplete / file, states);
    }
    publish_tag(target);
  } catch (...) {
    abandon_tag(target);
    throw;
  }
  write_whole_file((fs::path(save_dir) / kLatestUniversal).string(), tag);
}

}  // namespace ds::checkpoint
