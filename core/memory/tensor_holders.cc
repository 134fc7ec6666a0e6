#include "core/memory/tensor_holders.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>

namespace ds {
namespace {

// The references to a storage, and to tensors on it, that some tensors account for: themselves and what they are views
// of.
struct Owners {
  struct References {
    size_t counted = 0;
    size_t all = 0;
  };
  std::unordered_map<const at::TensorImpl*, References> tensors;
  int given = 0;

  bool others() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const auto& of) { return of.second.all > of.second.counted; });
  }
};

bool has_storage(const at::Tensor& tensor) { return tensor.defined() && tensor.has_storage(); }

}  // namespace

std::vector<bool> find_shared(const std::vector<at::Tensor>& tensors) {
  std::unordered_map<const c10::StorageImpl*, Owners> owners;
  const auto count = [&](const at::Tensor& tensor, bool is_given) {
    Owners& of = owners[tensor.storage().unsafeGetStorageImpl()];
    of.given += is_given ? 1 : 0;
    Owners::References& references = of.tensors[tensor.unsafeGetTensorImpl()];
    ++references.counted;
    references.all = tensor.use_count();
  };
  for (const at::Tensor& tensor : tensors) {
    if (!has_storage(tensor)) continue;
    count(tensor, /*is_given=*/true);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
    if (view == nullptr) continue;
    if (view->has_bw_view()) count(view->get_backward_view().base_, /*is_given=*/false);
    if (view->has_fw_view() && !view->shared_view_info()) count(view->get_forward_view().base_, /*is_given=*/false);
  }
  std::vector<bool> shared;
  for (const at::Tensor& tensor : tensors) {
    if (!has_storage(tensor)) {
      shared.push_back(false);
      continue;
    }
    const Owners& of = owners.at(tensor.storage().unsafeGetStorageImpl());
    shared.push_back(of.given > 1 || of.others() || tensor.storage().use_count() > of.tensors.size());
  }
  return shared;
}

bool has_given_memory(const at::Tensor& tensor) { return has_storage(tensor) && !tensor.storage().resizable(); }

int64_t version_of(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_inference() ? 0 : tensor._version();
}

}  // namespace ds
