#include "model/checkpoint/fp32_model.h"

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <exception>
#include <filesystem>
#include <map>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/module_file.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "model/checkpoint/rank_state.h"
#include "model/state/whole_state.h"

namespace ds::engine {
namespace {

// A copy on the host of what the module has beside trained and frozen parameters.
at::Tensor float32_copy(const at::Tensor& values) {
  const bool narrow = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
  return values.detach().to(at::kCPU, narrow ? at::kFloat : values.scalar_type(), /*non_blocking=*/false,
                            /*copy=*/true);
}

// The tensors of the whole module under all their names. `masters`: parameters, each under its first name.
std::vector<checkpoint::ModuleTensor> tensors_of(const ModelState& state, const NamedTensors& masters) {
  const std::map<std::string, at::Tensor> by_name(masters.begin(), masters.end());
  std::unordered_map<const void*, at::Tensor> values;  // by identity of what is trained
  for (const auto* list : {&state.parameters, &state.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      values.emplace(parameter.tensor.unsafeGetTensorImpl(), by_name.at(parameter.name));
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

}  // namespace

void save_fp32_model(const ModelState& state, const std::string& path) {
  comm::Communicator& ranks = state.ranks.layer_ranks();
  const bool writes = ranks.rank() == 0;
  const NamedTensors masters = whole_masters(state, writes);
  std::exception_ptr failure;
  try {
    if (writes) {
      std::error_code ignored;  // what it means for the file is said when that cannot be made
      std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
      checkpoint::write_module_file(path, tensors_of(state, masters),
                                    checkpoint::modules_without_tensors(*state.module));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  require<IoError>(comm::failed_rank(failure, state.ranks.device, ranks) < 0,
                   "save_fp32_model: rank 0 could not write ", path, ", its message says why");
}

}  // namespace ds::engine
