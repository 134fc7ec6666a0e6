// Brings updated slices back to all ranks (stages 1 and 2).
//
// After the optimizer has updated this rank's slice of a bucket, publish() starts an all_gather of the bucket in place.
// The next forward does not wait for all of them: an operator that reads a parameter waits for that parameter's bucket
// only.
#pragma once

#include <cstddef>
#include <exception>
#include <vector>

#include "comm/communicator.h"
#include "zero/op_interceptor.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// All methods on the engine's thread, which is also the thread that runs forward.
class ParameterPublisher {
 public:
  // Both outlive the publisher. Does nothing with one rank. The destructor waits for what is on its way: the parameters
  // outlive the engine.
  ParameterPublisher(const std::vector<ParameterBucket>& buckets, comm::Communicator& communicator);
  ~ParameterPublisher();

  // The own slice of `bucket` is final; the others' parts may not be read before a wait.
  void publish(size_t bucket);
  // Throws CommError, also one that an operator's wait met: LibTorch only logs what a callback throws.
  void wait_all();

 private:
  void before_read(const at::Tensor& tensor);
  void wait(size_t bucket);

  const std::vector<ParameterBucket>& buckets_;
  comm::Communicator& communicator_;
  std::vector<comm::Work> works_;
  std::vector<bool> pending_;
  size_t pending_count_ = 0;
  std::exception_ptr failure_;  // of a wait
  OpInterceptor interceptor_;
};

}  // namespace ds::zero
