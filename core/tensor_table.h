// A table of the process that says for tensors what is known of each, so that an operator or a function that gets the
// tensor alone finds it.
//
// A tensor is known by its identity, which to(), set_data() and an engine keep. An entry refers to it weakly: it keeps
// no memory of the tensor's, and no later tensor can lie at the same address as long as the entry is there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <iterator>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace ds {

// Thread safe. A default `Value` means that nothing is known.
template <class Value>
class TensorTable {
 public:
  // Notes the value of the tensor in the place of the one before.
  void set(const at::Tensor& tensor, Value value) {
    change(tensor, [&](Value& noted) { noted = std::move(value); });
  }

  // Changes the value of the tensor, which is a default one where there was none.
  template <class Change>
  void change(const at::Tensor& tensor, const Change& change) {
    const std::unique_lock lock(mutex_);
    const auto entry = entries_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr()).first;
    change(entry->second.value);
  }

  Value find(const at::Tensor& tensor) const {
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(tensor.unsafeGetTensorImpl());
    return found == entries_.end() ? Value() : found->second.value;
  }

  // Drops the entries of tensors that are gone, and those for whose value `is_over` returns true; it may change others.
  template <class IsOver>
  void drop(const IsOver& is_over) {
    const std::unique_lock lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const bool goes = entry->second.tensor.expired() || is_over(entry->second.value);
      entry = goes ? entries_.erase(entry) : std::next(entry);
    }
  }

 private:
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  struct Entry {
    explicit Entry(const c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>& of) : tensor(of) {}
    Weak tensor;
    Value value{};
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
};

}  // namespace ds
