#include "model/state/parameter_memory.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "core/memory/storage_memory.h"
#include "core/split/split_tensor.h"

namespace ds::engine {
namespace {

// The memory of a parameter: [begin, end), in bytes.
struct Extent {
  std::string name;
  at::Tensor tensor;
  // Null where `begin` is an address. Storage without memory (on the meta device, of zero::Init) has offsets of its
  // own.
  const c10::StorageImpl* space = nullptr;
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

// The number of elements from the first to the last one of a tensor in its storage.
int64_t spread_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last + 1;
}

Extent extent_of(std::string name, const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto memory = reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  const auto element = static_cast<uintptr_t>(tensor.element_size());
  Extent extent{.name = std::move(name), .tensor = tensor, .space = memory == 0 ? storage : nullptr};
  extent.begin = memory + static_cast<uintptr_t>(tensor.storage_offset()) * element;
  extent.end = extent.begin + static_cast<uintptr_t>(spread_of(tensor)) * element;
  return extent;
}

// Whether two tensors whose extents overlap have elements in common: columns of one matrix have not.
bool have_common_elements(const at::Tensor& a, const at::Tensor& b) {
  const bool both_dense = a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense();
  if (both_dense || a.dtype() != b.dtype() || !is_same_storage(a.storage(), b.storage())) return true;
  const int64_t first = std::min(a.storage_offset(), b.storage_offset());
  const int64_t end = std::max(a.storage_offset() + spread_of(a), b.storage_offset() + spread_of(b));
  const at::Tensor taken = at::zeros({end - first}, at::kBool);
  taken.as_strided(a.sizes(), a.strides(), a.storage_offset() - first).fill_(true);
  return taken.as_strided(b.sizes(), b.strides(), b.storage_offset() - first).any().item<bool>();
}

void require_apart(std::vector<Extent> extents, const char* call) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::tie(a.space, a.begin) < std::tie(b.space, b.begin); });
  for (size_t i = 0; i < extents.size(); ++i) {
    const Extent& one = extents[i];
    for (size_t j = i + 1; j < extents.size(); ++j) {
      const Extent& other = extents[j];
      if (other.space != one.space || other.begin >= one.end) break;
      if (!one.tensor.requires_grad() && !other.tensor.requires_grad()) continue;
      require(!have_common_elements(one.tensor, other.tensor), call, ": parameters ", one.name, " and ", other.name,
              " are two tensors over one memory: expected memory of its own for each, for each gets its place in a ",
              "bucket, and the two would be trained apart. To tie them, register one tensor under both names ",
              "(second->weight = second->register_parameter(\"weight\", first->weight), with first->weight.t() in ",
              "forward() where it is read transposed); to train them apart, give one a copy of its own ",
              "(weight.set_data(weight.detach().clone()))");
    }
  }
}

// Who holds a storage beside parameters, in words; empty: nobody.
std::string other_owner(const at::Tensor& tensor, size_t parameters,
                        const std::unordered_map<const void*, std::vector<std::string>>& buffers) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto found = buffers.find(storage);
  if (found != buffers.end()) return cat("the buffer ", found->second.front());
  if (tensor.storage().use_count() > parameters) return "another tensor";
  const c10::DataPtr& memory = storage->_mutable_data_ptr_no_checks();
  const bool of_program = memory.get() != nullptr && memory.get_context() == nullptr;
  return of_program ? "the program (from_blob())" : std::string();
}

void tell_other_owners(const torch::nn::Module& module, const std::vector<Extent>& extents, const char* call) {
  std::unordered_map<const void*, size_t> parameters;
  for (const Extent& one : extents) ++parameters[one.tensor.storage().unsafeGetStorageImpl()];
  std::unordered_map<const void*, std::vector<std::string>> buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined() && item.value().has_storage()) {
      buffers[item.value().storage().unsafeGetStorageImpl()].push_back(item.key());
    }
  }
  std::string first;
  size_t count = 0;
  for (const Extent& one : extents) {
    const size_t own = parameters[one.tensor.storage().unsafeGetStorageImpl()];
    const std::string owner = other_owner(one.tensor, own, buffers);
    if (owner.empty() || count++ > 0) continue;
    first = cat("parameter ", one.name, " is held by ", owner, " too");
  }
  if (count == 0) return;
  const std::string more = count == 1 ? "" : cat(", and that of ", count - 1, " other parameters by others");
  log::warning(call, ": the memory of ", first, more, ": parameters get other memory here, so that what others hold ",
               "(a detach() or a view that was kept, a module over the same memory, an open InputArchive) neither ",
               "follows the training nor changes the model. Keep the parameter itself, which is one tensor with the ",
               "module's, or take a clone()");
}

}  // namespace

void require_own_memory(const torch::nn::Module& module, const char* call, bool says,
                        const std::function<bool(const at::Tensor&)>& known) {
  std::vector<Extent> extents;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.has_storage() || is_split(tensor) || tensor.layout() != at::kStrided) continue;
    if (tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second || (known && known(tensor))) continue;
    extents.push_back(extent_of(item.key(), tensor));
  }
  if (says) tell_other_owners(module, extents, call);
  require_apart(std::move(extents), call);
}

}  // namespace ds::engine
