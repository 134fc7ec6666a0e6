#include "model/checkpoint/save_model.h"

#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "model/state/whole_state.h"

namespace ds::engine {
namespace {

// What rank 0 does, while the others only take part in the gathers. A failure is kept until all ranks are through.
class WeightFile {
 public:
  WeightFile(const std::string& path, const torch::nn::Module& module, bool with_frozen) {
    std::vector<SafetensorsWriter::Header> headers;
    for (const auto& item : module.named_parameters()) {
      if (!with_frozen && !trained_tensor(item.value()).requires_grad()) continue;
      names_[trained_tensor(item.value()).unsafeGetTensorImpl()].push_back(item.key());
      headers.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
    }
    for (const auto& item : module.named_buffers()) {
      headers.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
    }
    attempt([&] {
      std::error_code failure;  // what it means for the file is said when that cannot be made
      std::filesystem::create_directories(std::filesystem::path(path).parent_path(), failure);
      writer_.emplace(path, headers, std::map<std::string, std::string>{{"format", "pt"}});
    });
  }

  // `values`: of the whole.
  void write(const zero::Parameter& parameter, const at::Tensor& values) {
    const auto found = names_.find(parameter.tensor.unsafeGetTensorImpl());
    if (found == names_.end()) return;
    for (const std::string& name : found->second) write(name, values);
  }
  void write(const std::string& name, const at::Tensor& tensor) {
    attempt([&] { writer_->write(name, tensor); });
  }
  void commit() {
    attempt([&] { writer_->commit(); });
  }
  const std::exception_ptr& failure() const { return failure_; }

 private:
  template <class Action>
  void attempt(const Action& action) {
    if (failure_) return;
    try {
      action();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  std::map<const void*, std::vector<std::string>> names_;  // by identity of what is trained: tied ones have several
  std::optional<SafetensorsWriter> writer_;
  std::exception_ptr failure_;
};

// Whole ones as they come; parts are joined afterwards, in module order, which ranks of a tensor axis share. Their
// buckets may be others.
void write_parameters(const ModelState& state, std::optional<WeightFile>& file) {
  std::unordered_map<const void*, at::Tensor> parts;  // at stage 3, on the host
  if (state.gatherer) {
    const bool joins = state.ranks.part->rank() == 0;  // for rank 0
    for_each_whole_bucket(state, 0, [&](const zero::ParameterBucket& bucket) {
      for (const zero::Parameter& parameter : bucket.parameters()) {
        if (parameter.part && joins) {
          parts[parameter.tensor.unsafeGetTensorImpl()] = parameter.tensor.detach().to(at::kCPU, false, /*copy=*/true);
        } else if (!parameter.part && file) {
          file->write(parameter, parameter.tensor);
        }
      }
    });
  }
  for (const auto* list : {&state.parameters, &state.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      if (parameter.part && state.ranks.part->rank() == 0) {
        const auto found = parts.find(parameter.tensor.unsafeGetTensorImpl());
        const at::Tensor own = found == parts.end() ? parameter.tensor.detach() : found->second;
        const at::Tensor whole = joined_over_axis(state, parameter, own);
        if (file) file->write(parameter, whole);
      } else if (!parameter.part && !state.gatherer && file) {
        file->write(parameter, parameter.tensor);
      }
    }
  }
}

}  // namespace

void save_model(const ModelState& state, const std::string& path, bool with_frozen) {
  comm::Communicator& ranks = state.tensor ? *state.ranks.world : *state.ranks.part;
  std::optional<WeightFile> file;
  if (ranks.rank() == 0) file.emplace(path, *state.module, with_frozen);
  write_parameters(state, file);
  if (file) {
    for (const auto& item : state.module->named_buffers()) file->write(item.key(), item.value());
    file->commit();
  }
  require<IoError>(comm::failed_rank(file ? file->failure() : nullptr, state.ranks.device, ranks) < 0,
                   "save_16bit_model: rank 0 could not write ", path, ", its message says why");
}

}  // namespace ds::engine
