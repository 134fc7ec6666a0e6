// Building a model whose parameters do not fit in one rank's memory: what deepspeed.zero.Init is.
//
//   zero::Init init(ranks);                       // all ranks, see engine::init_distributed
//   Gpt model(config);                            // any constructor; parameters are sliced while it runs
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .init = &init});
//
// While it lives, the operators of this thread are watched. A tensor that an operator made and that then requires a
// gradient without a graph is a parameter. Parameters beyond a limit are kept as slices: rank 0's values, one even part
// on each rank; an operator that reads one (an initialization of the whole model, say) gets it whole again first.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "comm/communicator.h"
#include "core/op_interceptor.h"

namespace ds::zero {

struct InitOptions {
  int64_t max_live = 64 << 20;  // elements of parameters that may be whole at a time, beside what an operator reads
  int64_t smallest = 64 << 10;  // elements; smaller parameters stay whole
};

// Every rank runs the same constructors on the thread that made this object, so that the collectives in them agree.
// Ends with initialize(), which takes the parameters over one bucket after the other; destroyed before, sliced
// parameters have no elements. Nothing is watched with one rank.
class Init {
 public:
  explicit Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options = {});
  ~Init();
  Init(const Init&) = delete;
  Init& operator=(const Init&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  // Throws what a collective or the lack of memory threw in the middle of an operator; parameters hold zeros since.
  void rethrow();
  // The parameter gets memory of its own: what this object keeps of it is dropped.
  void forget(const at::Tensor& parameter);
  // Nothing is watched any more, unless parameters of another model are still sliced.
  void end();
  // Elements of parameters that are whole now, and most of all times.
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  // Bytes of slices on this rank.
  int64_t held_bytes() const;

 private:
  struct Entry {
    at::Tensor parameter;  // shares its identity with the module's
    at::Tensor slice;      // [ceil(numel / W)]; undefined before the first time
    bool whole = true;
    uint32_t version = 0;                    // of the parameter when it was last equal to the slices
    uint64_t used_by = 0;                    // outermost operator that read it last
    std::list<const void*>::iterator place;  // in order_, while whole; holds the key of the entry
  };
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static void on_made(const at::RecordFunction& function, at::ObserverContext* context);
  void made(const at::Tensor& tensor);
  void before_read(const at::Tensor& tensor);
  void adopt_parameters();
  void touch(Entry& entry);
  Entry& found_again(const void* storage);
  void stop_watching();
  void make_room(int64_t elements);
  void slice(Entry& entry);
  void gather(Entry& entry);
  template <class Action>
  void guarded(const Action& action);

  std::shared_ptr<comm::Communicator> ranks_;
  InitOptions options_;
  std::unordered_map<const void*, Entry> entries_;  // by storage
  std::list<const void*> order_;                    // storages of whole parameters, the one read last at the end
  std::vector<Weak> candidates_;                    // made and not known to be anything yet
  int64_t live_ = 0;
  int64_t peak_ = 0;
  bool busy_ = false;
  std::exception_ptr failure_;
  OpInterceptor interceptor_;
  at::CallbackHandle made_handle_ = 0;
};

}  // namespace ds::zero
