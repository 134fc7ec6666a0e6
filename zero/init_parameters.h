// What a zero::Init keeps of the parameters of a model under construction: which ones it has seen, and their slices.
// Included by zero/init.cc only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "dsengine/zero.h"

namespace ds::zero {

// One per Init, which documents the calls.
class Init::Parameters {
 public:
  Parameters(std::shared_ptr<comm::Communicator> ranks, InitOptions options);
  ~Parameters();
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  void rethrow();
  void forget(const at::Tensor& parameter);
  void end();
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  int64_t held_bytes() const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    Entry(const at::Tensor& tensor, std::string name)
        : parameter(tensor), label(std::move(name)), storage(tensor.storage().getWeakStorageImpl()) {}
    at::Tensor parameter;  // shares its identity with the module's
    std::string label;
    WeakStorage storage;  // that the parameter had when it was looked at last; its address is not used again meanwhile
    at::Tensor slice;     // [ceil(numel / W)], while the parameter is not whole
    uint64_t last_use = 0;  // of a whole one: by count of reads
    uint64_t used_by = 0;   // outermost operator that read it last
    bool whole() const { return !slice.defined(); }
  };

  static void on_made(const at::RecordFunction& function, at::ObserverContext* context);
  void made(const at::Tensor& tensor);
  void before_read(const at::Tensor& tensor);
  void adopt_parameters();
  void adopt(const at::Tensor& parameter);
  void find_moved();
  void touch(Entry& entry);
  void make_room(int64_t elements);
  void slice(Entry& entry);
  void gather(Entry& entry);
  void drop(size_t entry);
  void stop_watching();
  void require_same_options();
  template <class Action>
  void guarded(const Action& action);

  // That of this thread: callbacks of at::RecordFunction carry no state.
  static thread_local Parameters* building;

  std::shared_ptr<comm::Communicator> ranks_;
  InitOptions options_;
  std::vector<std::unique_ptr<Entry>> entries_;  // in the order in which they became parameters: the same on all ranks
  std::unordered_map<const void*, Entry*> by_storage_;
  std::vector<WeakTensor> candidates_;  // made and not known to be anything yet
  int64_t adopted_ = 0;
  uint64_t uses_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  bool adopts_ = true;
  bool busy_ = false;
  std::exception_ptr failure_;
  bool failed_ = false;  // no collectives any more: ranks may have parted
  OpInterceptor interceptor_;
  at::CallbackHandle made_handle_ = 0;
};

}  // namespace ds::zero
