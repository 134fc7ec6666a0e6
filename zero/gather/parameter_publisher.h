// Brings updated slices back to all ranks (stages 1 and 2); at stage 0, where every rank updates full buckets,
// nothing.
//
// After the optimizer has updated this rank's slice of a bucket, an all_gather of the bucket in place starts.
// The next forward does not wait for all of them: an operator that reads a parameter waits for that parameter's bucket
// only. Whoever reads it otherwise (data_ptr(), another thread) gets a c10::Error meanwhile.
#pragma once

#include <cstddef>
#include <exception>
#include <unordered_map>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "zero/gather/parameter_access.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// All methods are called on the engine's thread, which is also the thread that runs forward.
class ParameterPublisher : public ParameterAccess {
 public:
  // `buckets` and `communicator` outlive the publisher. `partitioned`: ranks update slices. Does nothing with one rank.
  // The destructor waits for what is on its way: the parameters outlive the engine.
  ParameterPublisher(std::vector<ParameterBucket>& buckets, comm::Communicator& communicator, bool partitioned);
  ~ParameterPublisher() override;

  // Waits for all parameters: gradients are made from them.
  void begin_backward(bool /*update_follows*/) override { wait_all(); }
  void end_backward() override {}
  void end_pass() override {}
  // Begins the all_gather of the bucket. The slices of other ranks may not be read before an operator's wait.
  void updated(size_t bucket) override;
  // Sends the rows to the other ranks, and waits for theirs.
  void updated_rows(size_t bucket, const at::Tensor& rows) override;
  void end_update() override {}
  void change_mode() override {}
  void wait_all() override;
  void use_from_this_thread() override;

 private:
  void before_read(const at::Tensor& tensor);
  void wait(size_t bucket);

  std::vector<ParameterBucket>& buckets_;
  comm::Communicator& communicator_;
  bool partitioned_;
  std::unordered_map<const void*, size_t> bucket_of_storage_;
  std::vector<comm::Work> works_;
  std::vector<bool> pending_;
  size_t pending_count_ = 0;
  std::exception_ptr failure_;  // the failure of a wait
  OpInterceptor interceptor_;
};

}  // namespace ds::zero
