#include "model/checkpoint/save_model.h"

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checkpoint/module_file.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/name_pattern.h"
#include "core/tensor_check.h"
#include "model/checkpoint/stage_tensors.h"
#include "model/state/tensor_parts.h"
#include "model/state/whole_state.h"
#include "optim/chunked_update.h"

namespace ds::engine {
namespace {

// The tensors that a file gets.
struct FileTensors {
  std::unordered_set<const void*> parameters;  // by identity of what is trained
  std::unordered_set<std::string> buffers;     // by name
  // Trained parameters, by the same identity, of which the file gets the masters; empty: none.
  std::unordered_set<const void*> masters;

  bool has(const zero::Parameter& parameter) const { return parameters.contains(identity(parameter)); }
  bool has_some(const zero::ParameterBucket& bucket) const {
    const auto& own = bucket.parameters();
    return std::any_of(own.begin(), own.end(), [&](const auto& one) { return has(one); });
  }
  static const void* identity(const zero::Parameter& parameter) { return parameter.tensor.unsafeGetTensorImpl(); }
};

FileTensors whole_model(const torch::nn::Module& module, bool with_frozen) {
  FileTensors tensors;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor trained = trained_tensor(parameter);
    if (with_frozen || trained.requires_grad()) tensors.parameters.insert(trained.unsafeGetTensorImpl());
  }
  for (const auto& item : module.named_buffers()) tensors.buffers.insert(item.key());
  return tensors;
}

void make_folder_of(const std::string& path) {
  std::error_code ignored;  // what it means for the file is said when that cannot be made
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
}

// Throws on all ranks where a rank could not write the file, or give what its stages have of it. Collective.
void require_written(const ModelState& state, const std::exception_ptr& failure, const std::string& path,
                     const char* call) {
  const int failed = comm::failed_rank(failure, state.ranks.device, *state.ranks.world);
  require<IoError>(failed < 0, call, ": rank ", failed, " could not write ", path, ", its message says why");
}

// Whether this rank, of those with the same layers, has a part in the file.
bool has_file(const ModelState& state) { return state.ranks.layer_ranks().rank() == 0; }

// The file that rank 0 writes, while the other ranks only take part in the gathers; the first ranks of later stages of
// a pipeline send it theirs. A failure is kept until all ranks are through.
class WeightFile {
 public:
  WeightFile(const std::string& path, const ModelState& state, const FileTensors& tensors) {
    const torch::nn::Module& module = *state.module;
    std::vector<StageTensor> own;
    for (const auto& item : module.named_parameters()) {
      const void* const trained = trained_tensor(item.value()).unsafeGetTensorImpl();
      if (!tensors.parameters.contains(trained)) continue;
      names_[trained].push_back(item.key());
      const at::ScalarType dtype = item.value().scalar_type();
      own.push_back({item.key(), tensors.masters.contains(trained) ? optimizers::state_type(dtype) : dtype,
                     item.value().sizes().vec()});
    }
    for (const auto& item : module.named_buffers()) {
      if (!tensors.buffers.contains(item.key())) continue;
      own.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec(), /*is_buffer=*/true});
    }
    if (state.pipeline) stages_.emplace(state, own);
    if (stages_ && !stages_->is_first()) return;
    std::vector<SafetensorsWriter::Header> headers;
    for (const StageTensor& one : stages_ ? stages_->all() : own) headers.push_back({one.name, one.dtype, one.sizes});
    attempt([&] {
      make_folder_of(path);
      writer_.emplace(path, headers, std::map<std::string, std::string>{{"format", "pt"}});
    });
  }

  // `values` are those of the full parameter.
  void write(const zero::Parameter& parameter, const at::Tensor& values) {
    const auto found = names_.find(parameter.tensor.unsafeGetTensorImpl());
    if (found == names_.end()) return;
    for (const std::string& name : found->second) write(name, values);
  }
  void write(const std::string& name, const at::Tensor& tensor) {
    attempt([&] {
      if (stages_ && !stages_->is_first()) {
        stages_->send(name, tensor);
      } else {
        writer_->write(name, tensor);
      }
    });
  }
  // Writes full values of the program's in the place of the parameters, and of the buffers that it names.
  void write_given(const StateDict& given, const torch::nn::Module& module) {
    attempt([&] {
      const auto values = values_for(given, module);
      const auto own_or_given = [&](const auto& item) {
        const auto found = values.find(item.key());
        return found == values.end() ? item.value() : found->second.detach().to(item.value().scalar_type());
      };
      for (const auto& item : module.named_buffers()) write(item.key(), own_or_given(item));
      for (const auto& item : module.named_parameters()) {
        if (names_.contains(trained_tensor(item.value()).unsafeGetTensorImpl())) write(item.key(), own_or_given(item));
      }
    });
  }
  // Takes what the later stages have, and completes the file.
  void commit() {
    if (stages_ && !stages_->is_first()) {
      if (failure_) stages_->give_up();
      return;
    }
    if (stages_) receive();
    attempt([&] { writer_->commit(); });
  }
  const std::exception_ptr& failure() const { return failure_; }

 private:
  // Receives after a failure of this rank too, for the other stages send all the same.
  void receive() {
    try {
      stages_->receive([&](const StageTensor& tensor, const at::Tensor& values) { write(tensor.name, values); });
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
  }
  template <class Action>
  void attempt(const Action& action) {
    if (failure_) return;
    try {
      action();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  // Returns the given values under the module's names: all parameters of the file, each tied one under all its names,
  // and those buffers that are given. Throws UsageError where they do not fit.
  std::map<std::string, at::Tensor> values_for(const StateDict& given, const torch::nn::Module& module) const {
    std::map<std::string, at::Tensor> values;
    const auto parameters = module.named_parameters();
    const auto buffers = module.named_buffers();
    for (const auto& [name, value] : given) {
      const at::Tensor* const own = parameters.contains(name) ? parameters.find(name) : buffers.find(name);
      require(own != nullptr, "save_16bit_model: from: ", name, ": expected names of the model's parameters and ",
              "buffers, as module_state_dict() has them, found one that it lacks");
      require(value.defined() && value.sizes() == own->sizes(), "save_16bit_model: from: ", name,
              ": expected a tensor of shape ", own->sizes(), ", found ", describe(value));
      require(values.emplace(name, value).second, "save_16bit_model: from: ", name,
              ": expected it once, found it twice");
    }
    std::vector<std::string> missing;
    for (const auto& [parameter, names] : names_) {
      const auto known =
          std::find_if(names.begin(), names.end(), [&](const auto& one) { return values.contains(one); });
      if (known == names.end()) {
        missing.push_back(names.front());
        continue;
      }
      const at::Tensor value = values.at(*known);
      for (const std::string& name : names) values.emplace(name, value);
    }
    std::sort(missing.begin(), missing.end());
    require(missing.empty(), "save_16bit_model: from: expected, on the first rank with these layers, values of all ",
            names_.size(), " parameters that the file gets, found none of ", missing.size(), ", the first of them ",
            lazy([&] { return missing.front(); }));
    return values;
  }

  std::map<const void*, std::vector<std::string>> names_;  // by identity of what is trained: tied ones have several
  std::optional<StageTensors> stages_;                     // with a pipeline
  std::optional<SafetensorsWriter> writer_;                // where the file is written
  std::exception_ptr failure_;
};

// Hands masters of the file's trained parameters to `take`, bucket by bucket. Collective.
void for_each_master(const ModelState& state, const FileTensors& tensors,
                     const std::function<void(const zero::Parameter&, const at::Tensor&)>& take) {
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = state.buckets[b];
    if (!tensors.has_some(bucket)) continue;
    const at::Tensor flat = whole_master(state, b);
    for (const Segment& segment : bucket.layout().segments) {
      const zero::Parameter& parameter = state.parameters[static_cast<size_t>(segment.parameter)];
      if (!tensors.has(parameter)) continue;
      take(parameter, zero::view_of(flat, segment, parameter.tensor).to(optimizers::state_type(flat.scalar_type())));
    }
  }
}

// Writes full parameters as they come, and then joins parts, in module order, which ranks of a tensor axis share: their
// buckets may differ.
void write_parameters(const ModelState& state, const FileTensors& tensors, std::optional<WeightFile>& file) {
  // The parameters that were gathered, by identity of what is trained: copies of parts, on the host, where they are
  // joined; undefined tensors for all others.
  std::unordered_map<const void*, at::Tensor> gathered;
  const bool joins = state.ranks.part->rank() == 0;  // for rank 0
  const auto take = [&](const zero::Parameter& parameter, const at::Tensor& values) {
    if (!tensors.has(parameter)) return;
    at::Tensor& copy = gathered[FileTensors::identity(parameter)];
    if (parameter.part && joins) {
      copy = values.detach().to(at::kCPU, false, /*copy=*/true);
    } else if (!parameter.part && file) {
      file->write(parameter, values);
    }
  };
  if (!tensors.masters.empty()) for_each_master(state, tensors, take);
  for_each_whole_bucket(
      state, tensors.masters.empty() ? 0 : state.buckets.size(),
      [&](const zero::ParameterBucket& bucket) {
        for (const zero::Parameter& parameter : bucket.parameters()) take(parameter, parameter.tensor);
      },
      [&](const zero::ParameterBucket& bucket) { return tensors.has_some(bucket); });
  for (const auto* list : {&state.parameters, &state.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      if (!tensors.has(parameter)) continue;
      const auto found = gathered.find(FileTensors::identity(parameter));
      if (parameter.part && joins) {
        const at::Tensor own = found == gathered.end() ? parameter.tensor.detach() : found->second;
        const at::Tensor whole = joined_over_axis(state, parameter, own);
        if (file) file->write(parameter, whole);
      } else if (!parameter.part && found == gathered.end() && file) {
        file->write(parameter, parameter.tensor);
      }
    }
  }
}

// `from`: values of the program's in the place of the model's. `call`: the call to name.
void write_file(const ModelState& state, const std::string& path, const FileTensors& tensors,
                const std::optional<StateDict>& from, const char* call) {
  std::optional<WeightFile> file;
  if (has_file(state)) file.emplace(path, state, tensors);
  if (from) {
    if (file) file->write_given(*from, *state.module);
  } else {
    write_parameters(state, tensors, file);
    if (file) {
      for (const auto& item : state.module->named_buffers()) {
        if (tensors.buffers.contains(item.key())) file->write(item.key(), item.value());
      }
    }
  }
  if (file) file->commit();
  require_written(state, file ? file->failure() : nullptr, path, call);
}

// Returns the tensors that the patterns mean. Each means at least one, of any stage. Collective.
FileTensors tensors_named(const ModelState& state, const std::vector<std::string>& patterns) {
  FileTensors tensors;
  std::vector<int64_t> found(patterns.size());  // by pattern, 1 for yes; then of all ranks
  for (size_t i = 0; i < patterns.size(); ++i) {
    const NamePattern wanted = NamePattern::stars(patterns[i]);
    for (const auto& item : state.module->named_parameters()) {
      if (!wanted.matches(item.key())) continue;
      tensors.parameters.insert(trained_tensor(item.value()).unsafeGetTensorImpl());
      found[i] = 1;
    }
    for (const auto& item : state.module->named_buffers()) {
      if (!wanted.matches(item.key())) continue;
      tensors.buffers.insert(item.key());
      found[i] = 1;
    }
  }
  if (state.pipeline) {
    found = comm::numbers_of_ranks(*state.pipeline->ranks, state.ranks.device, found, "names of tensors of the stages");
  }
  for (size_t i = 0; i < patterns.size(); ++i) {
    bool any = false;
    for (size_t j = i; j < found.size(); j += patterns.size()) any = any || found[j] == 1;
    require(any, "save_weights: names: \"", patterns[i],
            "\": expected the name of a parameter or buffer, or a pattern ",
            "of some (\"*\" stands for any text), found none of that name in the model");
  }
  return tensors;
}

// A copy on the host of what the module has beside trained and frozen parameters.
at::Tensor float32_copy(const at::Tensor& values) {
  const bool narrow = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
  return values.detach().to(at::kCPU, narrow ? at::kFloat : values.scalar_type(), /*non_blocking=*/false,
                            /*copy=*/true);
}

// The tensors of the whole module under all their names. `masters`: parameters, each under its first name.
std::vector<checkpoint::ModuleTensor> float32_module(const ModelState& state, const StateDict& masters) {
  const std::map<std::string, at::Tensor> by_name(masters.begin(), masters.end());
  std::unordered_map<const void*, at::Tensor> values;  // by identity of what is trained
  for (const auto* list : {&state.parameters, &state.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      values.emplace(FileTensors::identity(parameter), by_name.at(parameter.name));
    }
  }
  std::vector<checkpoint::ModuleTensor> tensors;
  for (const auto& item : state.module->named_parameters()) {
    const auto found = values.find(trained_tensor(item.value()).unsafeGetTensorImpl());
    tensors.push_back({item.key(), found == values.end() ? float32_copy(item.value()) : found->second});
  }
  for (const auto& item : state.module->named_buffers()) {
    tensors.push_back({item.key(), float32_copy(item.value()), /*is_buffer=*/true});
  }
  return tensors;
}

// Returns, on the first stage, the tensors of all stages; sends it those of a later one. Collective over the first rank
// of each stage.
std::vector<checkpoint::ModuleTensor> of_all_stages(const ModelState& state,
                                                    std::vector<checkpoint::ModuleTensor> tensors) {
  if (!state.pipeline) return tensors;
  std::vector<StageTensor> own;
  for (const auto& one : tensors) {
    own.push_back({one.name, one.values.scalar_type(), one.values.sizes().vec(), one.is_buffer});
  }
  StageTensors stages(state, own);
  if (stages.is_first()) {
    stages.receive([&](const StageTensor& one, const at::Tensor& values) {
      tensors.push_back({one.name, values.to(at::kCPU), one.is_buffer});
    });
  } else {
    try {
      for (const auto& one : tensors) stages.send(one.name, one.values);
    } catch (...) {
      stages.give_up();
      throw;
    }
  }
  return tensors;
}

}  // namespace

void save_model(const ModelState& state, const std::string& path, bool with_frozen,
                const std::optional<StateDict>& from) {
  write_file(state, path, whole_model(*state.module, with_frozen), from, "save_16bit_model");
}

void save_chosen(const ModelState& state, const std::string& path, const SaveWeightsOptions& options) {
  FileTensors tensors = tensors_named(state, options.names);
  for (const zero::Parameter& parameter : state.parameters) {
    if (options.names.empty()) tensors.parameters.insert(FileTensors::identity(parameter));
    if (options.masters) tensors.masters.insert(FileTensors::identity(parameter));
  }
  const bool own = !tensors.parameters.empty() || !tensors.buffers.empty();
  const bool any = comm::largest_of_ranks(own ? 1 : 0, state.ranks.device, *state.ranks.world, "tensors to save") == 1;
  require(any, "save_weights: expected trained parameters, found ",
          "none (the engine has no optimizer); name what is to be written in SaveWeightsOptions::names");
  write_file(state, path, tensors, std::nullopt, "save_weights");
}

void save_fp32_model(const ModelState& state, const std::string& path) {
  const StateDict masters = whole_masters(state, has_file(state));
  const std::vector<std::string> empty_modules = modules_without_tensors(state);
  std::exception_ptr failure;
  try {
    if (has_file(state)) {
      const std::vector<checkpoint::ModuleTensor> tensors = of_all_stages(state, float32_module(state, masters));
      if (state.pipeline_rank() == 0) {
        make_folder_of(path);
        checkpoint::write_module_file(path, tensors, empty_modules);
      }
    }
  } catch (...) {
    failure = std::current_exception();
  }
  require_written(state, failure, path, "save_fp32_model");
}

}  // namespace ds::engine
