// The record of the operators of one region: which storage holds which value now.
//
// A region is a run of operators that a chosen module accounts for. Nothing here keeps memory alive but the arguments
// of operators whose outputs live or are needed: storages are known by weak references.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "recompute/modules/operator_facts.h"
#include "recompute/modules/stored_value.h"

namespace ds::recompute {

// Whose count of changes a tensor has: its own, or its base's. Its address stays taken. A tensor's alias_of() has the
// same count and no way to say so: who asks for it has to know the tensor.
using Counts = c10::weak_intrusive_ptr<at::TensorImpl>;
Counts counts_of(const at::Tensor& tensor);

// The log of one thread.
class OperatorLog {
 public:
  // The value that the memory of a plain tensor has now: as it was made, or held from now on.
  std::shared_ptr<StoredValue> value_of(const at::Tensor& tensor, const Counts& counts);
  // The value of a tensor's storage, or null where no recorded operator has made it.
  std::shared_ptr<StoredValue> made_value_of(const at::Tensor& tensor) const;
  // From now on the value is held, by `tensor`, and its step is not needed any more.
  void hold(const std::shared_ptr<StoredValue>& value, const at::Tensor& tensor, const Counts& counts);

  // Something else than an operator is about to write to it.
  void before_unseen_write(const at::Tensor& tensor);

  // The notes about an operator that is about to run, until it has run.
  struct Draft {
    std::shared_ptr<Step> step;  // null: nothing that it makes can be dropped
    std::shared_ptr<StoredValue> before;
    std::vector<at::Tensor> written;
  };
  // Before it runs: `record`: whether its outputs may be dropped. Memory that it changes and that others need is copied
  // first.
  Draft begin(const c10::OperatorHandle& op, const OperatorFacts& facts, const torch::jit::Stack& stack, bool record);
  // After it ran; its outputs are on the stack.
  void end(const Draft& draft, const OperatorFacts& facts, const torch::jit::Stack& stack);

 private:
  // Memory may be known by tensors that count their changes apart (`data`, parameters of one bucket): a value is that
  // of one count.
  struct Held {
    std::weak_ptr<StoredValue> value;
    Counts counts;
  };
  struct Place {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::shared_ptr<StoredValue> made;  // dropped, or blank
    std::vector<Held> held;
    int64_t version = 0;  // of the tensor that made it
  };

  // Where an operator overwrites all of memory that nobody has written; else null.
  std::shared_ptr<StoredValue> blank_value_of(const c10::IValue& written) const;
  std::shared_ptr<Step> step_of(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                const torch::jit::Stack& stack);
  bool add_argument(Step& step, const c10::IValue& value);
  std::optional<TensorRef> ref_of(const at::Tensor& tensor);
  void before_write(const at::Tensor& tensor);
  static void add_held(Place& place, const std::shared_ptr<StoredValue>& value, const Counts& counts);
  // Whether an operator in place goes on from what can be made again.
  bool continues(const c10::OperatorHandle& op, const OperatorFacts& facts, const torch::jit::Stack& stack) const;
  void end_in_place(const Draft& draft);
  void enter(const at::Tensor& tensor, std::shared_ptr<StoredValue> value);
  void sweep();

  const std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  std::unordered_map<const c10::StorageImpl*, Place> places_;
  uint64_t operators_ = 0;
};

}  // namespace ds::recompute
