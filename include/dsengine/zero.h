// Building a model whose parameters do not fit in one rank's memory: what deepspeed.zero.Init is.
//
//   const auto job = engine::init_distributed();
//   zero::Init init(job.ranks, {.device = job.device});
//   Gpt model(config);                            // any constructor; parameters are sliced while it runs
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .init = &init, .distributed = job});
//
// While it lives, the operators of this thread are watched. A tensor that an operator made and that then requires a
// gradient without a graph is a parameter. Parameters beyond a limit are kept as slices: rank 0's values, one even part
// on each rank; an operator that reads one (an initialization of the whole model, say) gets it whole again first.
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

#include "comm/collective.h"
#include "core/op_interceptor.h"
#include "dsengine/comm.h"

namespace ds::zero {

// The same on every rank.
struct InitOptions {
  int64_t max_live = 64 << 20;   // elements of parameters that may be whole at a time, beside what an operator reads
  int64_t smallest = 64 << 10;   // elements; smaller parameters stay whole
  at::Device device = at::kCPU;  // where the ranks' communicator takes tensors, and where slices are kept
};

// Every rank runs the same constructors on the thread that made this object, so that the collectives in them agree.
// Ends with initialize(), which takes the parameters over one bucket after the other; destroyed before, sliced
// parameters have no elements. Nothing is watched with one rank.
//
// Parameters are changed through operators (any of LibTorch's), not through their pointers: what lies between two
// operators is not seen.
class Init {
 public:
  // Collective: throws UsageError when the ranks' options differ.
  explicit Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options = {});
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  // Throws what a collective or the lack of memory threw in the middle of an operator; nothing has been sliced since,
  // and parameters that could not be gathered hold zeros.
  void rethrow();
  // The parameter gets memory of its own: what this object keeps of it is dropped.
  void forget(const at::Tensor& parameter);
  // No tensor made from now on becomes a parameter; nothing is watched any more, unless parameters of another model are
  // still sliced.
  void end();
  // Elements of parameters that are whole now, and most of all times.
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  // Bytes of slices on this rank.
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
