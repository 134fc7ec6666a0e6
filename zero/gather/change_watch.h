// Notices changes in place of parameters of a bucket that is gathered for operators.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/parameter_bucket.h"

namespace ds::zero {

// Of one bucket. A change is known from an operator's schema, and so also of .data(), which has a version counter of
// its own; from version counters, where an operator is not seen. Not thread safe.
class ChangeWatch {
 public:
  // What the parameters hold now is what they should.
  void begin(const ParameterBucket& bucket);
  // An operator is about to change a tensor that lies in the bucket.
  void note() { noted_ = true; }
  // Whether anything has changed since begin(), and the name of a parameter that has: the first, where only an operator
  // tells.
  bool found(const ParameterBucket& bucket) const { return noted_ || changed_version(bucket) < versions_.size(); }
  std::string name(const ParameterBucket& bucket) const;

 private:
  size_t changed_version(const ParameterBucket& bucket) const;

  std::vector<int64_t> versions_;  // of the parameters
  bool noted_ = false;
};

// Whether a tensor shows a parameter or begins inside of it.
bool is_part_of(const at::Tensor& tensor, const Parameter& parameter);

}  // namespace ds::zero
