// ZeRO-3: parameters are whole only while operators read them.
//
// Every rank keeps its slice of each bucket. Before an operator reads a parameter whose bucket is released, the
// bucket's memory is taken and filled by an all_gather; it is given back once the pass has moved on. The order of use
// is recorded in one pass and prefetched in the next (Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857,
// section 6.2), as DeepSpeed does per module: here an operator is what uses a parameter, so modules need no hooks and
// no declarations.
//
// A bucket that is not sharded (persistent parameters) stays whole: gathered after an update, waited for at first use.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/op_interceptor.h"
#include "core/transfer_stream.h"
#include "dsengine/comm.h"
#include "dsengine/memory.h"
#include "zero/parameter_access.h"
#include "zero/parameter_bucket.h"
#include "zero/use_trace.h"

namespace ds::zero {

// Where the elements of a bucket come from.
struct GatherRoutes {
  // Holds a slice of each bucket on every rank. Serves the gatherer alone, so that gathers and reductions need no
  // common order.
  comm::Communicator& slices;
  // hpZ (Wang et al., ZeRO++, arXiv:2306.10209): ranks of one node, consecutive ones of `slices` in their order. What
  // was gathered once after an update is gathered from their secondary slices until the next one. May be null.
  comm::Communicator* node = nullptr;
  // qwZ, same paper: 8 = slices are sent as 8-bit integers, and operators see values of that precision; 0 = as they
  // are.
  int bits = 0;
};

// Collectives start on a communicator in an order that follows from the operators alone: ranks that run different
// ones meet in different all_gathers, and communicators that compare labels name the parameters each wanted.
//
// Passes end together: a rank that runs fewer operators than others is found at the start of backward or at its end.
//
// The memory of a failed gather holds zeros, and the next call from the engine throws what happened. An operator that
// changes a sliced parameter outside of a scope is such a failure, a UsageError with the parameter's name: the change
// is lost. It is known from the operator's schema, and so also of .data(), which has a version counter of its own; from
// version counters, where an operator is not seen.
//
// Autocast keeps a cast copy of each weight until the next backward. Without a graph that needs it, it would collect
// the whole model: its cache is off for operators that read sliced parameters while gradients are.
class ParameterGatherer : public ParameterAccess {
 public:
  // Trainable and frozen ones. All outlive the gatherer.
  ParameterGatherer(const std::vector<ParameterBucket*>& buckets, GatherRoutes routes, GatherLimits limits);
  // Waits for what is on its way. Sharded parameters lose their elements: read them before.
  ~ParameterGatherer() override;

  void begin_backward(bool update_follows) override;
  void end_backward() override;
  void end_pass() override;
  void updated(size_t bucket) override;
  void end_update() override;
  void change_mode() override;
  void wait_all() override;

  // Makes a bucket whole until as many calls of drop(), beside any pass, with exact values (but for those of an encoded
  // bucket). gather() is collective and throws CommError.
  void gather(size_t bucket);
  void drop(size_t bucket);
  // Of a gathered bucket: the parameters were changed, on every rank alike.
  void keep_changes(size_t bucket);
  // Of a gathered bucket: what was changed is lost with the next drop().
  void forget_changes(size_t bucket) { note_versions(entries_[bucket]); }

  // Between steps: gives back the memory that is kept from one gather to the next.
  void release_memory();
  // Most elements that were gathered at once since the last call.
  int64_t take_peak_elements();

 private:
  enum class State : uint8_t { kReleased, kComing, kWhole };
  struct Entry {
    ParameterBucket* bucket = nullptr;
    std::string label;
    State state = State::kReleased;
    comm::Work work;
    uint64_t last_use = 0;
    std::vector<int64_t> versions;  // of the parameters when they were gathered
    bool refused = false;           // an operator changed a parameter since
    uint64_t used_by = 0;           // outermost operator that read it last
    int held = 0;                   // gather() without drop()
    bool exact = true;              // was gathered without loss
    bool reads_slice = false;       // the gather under way reads the own slice
    TransferStream::Mark arrived;   // of the own slice, where it comes from the host,
    at::Tensor own;                 // to here, where others have slices too
  };

  void before_read(const at::Tensor& tensor);
  void choose_cast_cache(bool on);
  void refuse_change(Entry& entry, const at::Tensor& tensor);
  void use(size_t bucket);
  bool can_be_released(const Entry& entry) const;
  void start_gather(Entry& entry, bool exact = false);
  void gather_from_host(Entry& entry, const at::Tensor& slice);
  at::Tensor own_slice(const ParameterBucket& bucket) const;
  void prefetch_slices();
  void fetch(size_t bucket, bool exact = false);
  void allocate(size_t bucket);
  void wait(size_t bucket);
  void release(size_t bucket);
  void release_done();
  void release_all();
  void make_room(int64_t elements);
  void prefetch();
  void fail(size_t bucket);
  void note_versions(Entry& entry);
  void require_unchanged(const Entry& entry);
  void meet(const char* where);
  void rethrow();

  std::vector<Entry> entries_;
  std::unordered_map<const void*, size_t> bucket_of_storage_;
  comm::Communicator& communicator_;  // of slices
  comm::Communicator* node_;
  int bits_;
  GatherLimits limits_;
  UseTrace trace_;
  GatherMemory memory_;
  size_t current_ = 0;  // used last
  uint64_t uses_ = 0;
  int64_t sharded_ = 0;  // elements of all sharded buckets
  int64_t live_ = 0;     // elements of sharded buckets that are coming or whole
  int64_t coming_ = 0;   // of these, coming
  int64_t peak_ = 0;
  bool parameters_stay_ = true;  // the running pass is not followed by an update, as far as is known
  bool in_backward_ = false;
  bool cast_cache_off_ = false;  // turned off here
  TransferStream copies_;        // of slices on the host
  at::Tensor meeting_;           // what meet() sends
  comm::Work met_;
  std::exception_ptr failure_;
  OpInterceptor interceptor_;
};

// Whether a tensor shows a parameter or begins inside of it.
bool is_part_of(const at::Tensor& tensor, const Parameter& parameter);

}  // namespace ds::zero
