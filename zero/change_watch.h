// Notices changes of parameters that would be lost: in place, of a bucket that is gathered only for operators to read.
#pragma once

#include <cstdint>
#include <exception>
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
  // An operator is about to change `tensor`, which lies in the bucket. Returns the UsageError that says so.
  std::exception_ptr refuse(const ParameterBucket& bucket, const std::string& label, const at::Tensor& tensor);
  // Null where nothing has changed since begin(), and after refuse(), which has told already.
  std::exception_ptr find_change(const ParameterBucket& bucket) const;

 private:
  std::vector<int64_t> versions_;  // of the parameters
  bool refused_ = false;
};

// Whether a tensor shows a parameter or begins inside of it.
bool is_part_of(const at::Tensor& tensor, const Parameter& parameter);

}  // namespace ds::zero
