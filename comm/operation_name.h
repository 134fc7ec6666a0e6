// How messages name an operation between ranks.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>

#include "comm/collective.h"
#include "core/tensor_check.h"

namespace ds::comm {

// Prints "all_reduce 'bucket 3'", without the label where there is none. A view: the collective must outlive it.
class OperationTitle {
 public:
  explicit OperationTitle(const Collective& collective) : kind_(collective.kind), label_(collective.label) {}
  friend std::ostream& operator<<(std::ostream& out, const OperationTitle& title);

 private:
  CollectiveKind kind_;
  const std::string& label_;
};

// Prints "all_reduce 'bucket 3' (Float [12] on cpu)", with the input, or the output where there is no input. Holds what
// it says and no tensor, for whoever may have to name an operation after its tensors have gone. Made into text when it
// is written.
class OperationName {
 public:
  explicit OperationName(const Collective& collective);
  friend std::ostream& operator<<(std::ostream& out, const OperationName& name);

 private:
  CollectiveKind kind_;
  std::string label_;
  std::optional<TensorFacts> tensor_;
};

}  // namespace ds::comm
