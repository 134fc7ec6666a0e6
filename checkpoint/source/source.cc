#include "dsengine/checkpoint.h"

#include <ATen/ops/empty.h>

#include "core/check.h"

namespace ds::checkpoint {

std::string weight_path(const std::string& name) { return cat("weights/", name); }
std::string buffer_path(const std::string& name) { return cat("buffers/", name); }
std::string state_path(const std::string& state, const std::string& name) {
  return cat("optimizer/", state, "/", name);
}
std::string ema_path(const std::string& name) { return cat("ema/", name); }
std::string rank_path(int rank, const std::string& name) { return cat("ranks/", rank, "/", name); }
std::string rank_state_path(int rank, const std::string& name) { return rank_path(rank, cat("state/", name)); }

std::string name_in(const std::string& folder, const std::string& path) {
  return path.starts_with(folder) ? path.substr(folder.size()) : std::string();
}

int64_t TensorInfo::numel() const {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

const TensorInfo& Source::info(const std::string& path) const {
  const auto found = tensors().find(path);
  require<IoError>(found != tensors().end(), location(), ": no tensor \"", path, "\" among its ", tensors().size(),
                   " tensors");
  return found->second;
}

at::Tensor Source::tensor(const std::string& path) {
  const TensorInfo& wanted = info(path);
  const at::Tensor result = at::empty(wanted.sizes, wanted.dtype);
  read(path, 0, result);
  return result;
}

}  // namespace ds::checkpoint
