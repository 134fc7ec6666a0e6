// The facts that are known of an operator before it runs: whether it can be computed again, and what it changes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <string>
#include <vector>

namespace ds::recompute {

struct OperatorFacts {
  std::string name;  // "aten::add.Tensor"
  // Composed of other operators, which are seen instead.
  bool composite = false;
  // Its outputs can be dropped: new memory that is a function of arguments that are tensors or plain values, and of the
  // generators' states where it is random.
  bool replayable = false;
  bool random = false;
  // Cheap beside what it reads: element by element, along one row, or a copy. What recompute = kPointwise computes
  // again.
  bool pointwise = false;
  bool makes_blank = false;  // gives memory that nobody has written
  bool overwrites = false;   // changes its first argument, all of it, and does not read it
  size_t returns = 0;
  std::vector<size_t> writes;  // arguments whose elements it changes, also where its schema does not say so
};

// The reference lives as long as the thread.
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

}  // namespace ds::recompute
