// Writing the model's weights to one file, parameter by parameter.
#include <ATen/core/grad_mode.h>

#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/safetensors.h"
#include "engine/agreement/shared_failure.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

// What rank 0 does, while the others only take part in the gathers. A failure is kept until all ranks are through.
class WeightFile {
 public:
  WeightFile(const std::string& path, const torch::nn::Module& module, bool with_frozen) {
    std::vector<SafetensorsWriter::Header> headers;
    for (const auto& item : module.named_parameters()) {
      if (!with_frozen && !item.value().requires_grad()) continue;
      names_[item.value().unsafeGetTensorImpl()].push_back(item.key());
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

  void write(const at::Tensor& parameter) {
    const auto found = names_.find(parameter.unsafeGetTensorImpl());
    if (found == names_.end()) return;
    for (const std::string& name : found->second) write(name, parameter);
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

  std::map<const void*, std::vector<std::string>> names_;  // of a parameter, by identity: tied ones have several
  std::optional<SafetensorsWriter> writer_;
  std::exception_ptr failure_;
};

}  // namespace

std::string Engine::save_16bit_model(const std::string& folder, const std::string& filename,
                                     bool exclude_frozen_parameters) {
  const at::NoGradGuard no_grad;
  Impl& self = *impl_;
  require(!self.gatherer || self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save,
          "save_16bit_model: at stage 3 the weights are gathered for it; expected ",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save: true, found false");
  require(!self.pipeline || self.pipeline->ranks->size() == 1, "save_16bit_model: no rank of a pipeline has the whole ",
          "model; expected save_checkpoint() and then `ds-tool checkpoint convert`");
  self.require_whole_state("save_16bit_model()");
  const Impl::Phase phase(self, "save_16bit_model");
  synchronize_parameters();
  const std::string path = (std::filesystem::path(folder) / filename).string();
  std::optional<WeightFile> file;
  if (self.communicator->rank() == 0) file.emplace(path, *self.module, !exclude_frozen_parameters);
  if (self.gatherer) {
    self.for_each_whole_bucket(0, [&](const zero::ParameterBucket& bucket) {
      for (const zero::Parameter& parameter : bucket.parameters()) {
        if (file) file->write(parameter.tensor);
      }
    });
  } else if (file) {
    for (const auto* list : {&self.parameters, &self.frozen}) {
      for (const zero::Parameter& parameter : *list) file->write(parameter.tensor);
    }
  }
  if (file) {
    for (const auto& item : self.module->named_buffers()) file->write(item.key(), item.value());
    file->commit();
  }
  require<IoError>(failed_rank(file ? file->failure() : nullptr, self.device, *self.communicator) < 0,
                   "save_16bit_model: rank 0 could not write ", path, ", its message says why");
  return path;
}

}  // namespace ds::engine
