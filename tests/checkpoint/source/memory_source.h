// A checkpoint that lies in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

class MemorySource : public Source {
 public:
  // `path`: as in dsengine/checkpoint.h.
  void add(const std::string& path, const at::Tensor& tensor, bool frozen = false) {
    values_[path] = tensor.contiguous();
    tensors_[path] = {.dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec(), .frozen = frozen};
  }
  void add_alias(const std::string& name, const std::string& stored) { aliases_[name] = stored; }
  TrainingState& mutable_state() { return state_; }
  // Reading this one fails.
  void damage(const std::string& path) { damaged_ = path; }

  const std::string& location() const override { return location_; }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }
  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    require<IoError>(path != damaged_, location_, ": \"", path, "\" is damaged");
    info(path);
    largest_read_ = std::max(largest_read_, destination.numel());
    destination.view({-1}).copy_(values_.at(path).view({-1}).narrow(0, offset, destination.numel()));
  }
  // Elements, of one read().
  int64_t largest_read() const { return largest_read_; }

 private:
  std::string location_ = "memory";
  TrainingState state_;
  std::map<std::string, at::Tensor> values_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> aliases_;
  std::string damaged_;
  int64_t largest_read_ = 0;
};

}  // namespace ds::checkpoint
