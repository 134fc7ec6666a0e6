// Changes that a program makes in place to parameters that were gathered for operators: how they are noticed, and how
// they reach the slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/gather/gather_errors.h"
#include "zero/gather/parameter_access.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// Notices changes in place of the parameters of one bucket that is gathered for operators. A change is known from an
// operator's schema, which sees changes through .data() too, although that has a version counter of its own; from
// version counters, where an operator is not seen. Not thread safe.
class ChangeWatch {
 public:
  // Begins anew: the values that the parameters hold now count as unchanged.
  void begin(const ParameterBucket& bucket);
  // Notes that an operator is about to change a tensor that lies in the bucket.
  void note() { noted_ = true; }
  // Whether anything has changed since begin(), and the name of a parameter that has: the first, where only an operator
  // tells.
  bool found(const ParameterBucket& bucket) const { return noted_ || changed_version(bucket) < versions_.size(); }
  std::string name(const ParameterBucket& bucket) const;

 private:
  size_t changed_version(const ParameterBucket& bucket) const;

  std::vector<int64_t> versions_;  // the version counters of the parameters
  bool noted_ = false;
};

// Brings changed values of full buckets to the slices, and remembers which buckets were changed. Not thread safe.
class InPlaceChanges {
 public:
  // `rank`: this rank among the owners of slices. `errors` outlives it.
  InPlaceChanges(int rank, GatherErrors& errors) : rank_(rank), errors_(errors) {}

  // Copies the changes that `watch` has found in a full bucket to its slice. All ranks make the same changes, which the
  // engine compares. `exact`: the bucket was gathered without loss; for another one there is an error.
  void take_over(size_t index, ParameterBucket& bucket, const ChangeWatch& watch, bool exact);
  // Returns the buckets that were changed since the last call, each once.
  std::vector<ChangedBucket> take() { return std::exchange(changed_, {}); }
  // Has `call` called before slices take over changed values: somebody may read the slices on another thread. Empty: no
  // call.
  void call_before(std::function<void()> call) { before_ = std::move(call); }

 private:
  int rank_;
  GatherErrors& errors_;
  std::vector<ChangedBucket> changed_;
  std::function<void()> before_;
};

// Whether a tensor shows a parameter or begins inside of it.
bool is_part_of(const at::Tensor& tensor, const Parameter& parameter);

}  // namespace ds::zero
