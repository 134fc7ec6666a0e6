// Parameters of a model under construction that are kept in even parts: what zero::Init is made of, beside the watch
// for operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/zero.h"

namespace ds::zero {

// Whether a tensor owns its memory alone and is laid out row by row.
bool can_be_sliced(const at::Tensor& tensor);

// Parameters of which each rank has an even part while they are not needed in full. At most `max_live` of their
// elements are full at a time, beside those that the operator under way reads. Collective: all ranks adopt and read the
// same parameters in the same order.
class SlicedParameters {
 public:
  SlicedParameters(std::shared_ptr<comm::Communicator> ranks, const InitOptions& options)
      : ranks_(std::move(ranks)), options_(options) {}
  // Leaves the parameters that are not full without elements.
  ~SlicedParameters();
  SlicedParameters(const SlicedParameters&) = delete;
  SlicedParameters& operator=(const SlicedParameters&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  // Whether `tensor` is one of the parameters.
  bool contains(const at::Tensor& tensor) const;
  // Adds a full parameter, and makes room for it.
  void adopt(const at::Tensor& parameter);
  // Makes the parameter full that `tensor` lies in, if it lies in one.
  void fill(const at::Tensor& tensor);
  // Init::read_part().
  bool read_part(const at::Tensor& parameter, const at::Tensor& part);
  // Drops what is kept of the parameter.
  void forget(const at::Tensor& parameter);
  // Drops what is kept of the parameters that the program has dropped.
  void forget_unused();
  // Neither slices nor gathers from now on: a failure may have parted the ranks.
  void fail() { failed_ = true; }
  bool failed() const { return failed_; }
  bool all_whole() const;
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  int64_t held_bytes() const;

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    Entry(const at::Tensor& tensor, std::string name)
        : parameter(tensor), label(std::move(name)), storage(tensor.storage().getWeakStorageImpl()) {}
    at::Tensor parameter;  // shares its identity with the module's
    std::string label;
    WeakStorage storage;  // the parameter's storage when it was looked at last; its address is not used again meanwhile
    at::Tensor slice;     // [ceil(numel / W)], while the parameter is not full
    uint64_t last_use = 0;  // the last use of a full one, by count of reads
    uint64_t used_by = 0;   // outermost operator that read it last
    bool whole() const { return !slice.defined(); }
  };

  void find_moved();
  void make_room(int64_t elements);
  void slice(Entry& entry);
  void gather(Entry& entry);
  void add_live(int64_t elements);
  void drop(size_t entry);

  std::shared_ptr<comm::Communicator> ranks_;
  InitOptions options_;
  std::vector<std::unique_ptr<Entry>> entries_;  // in the order in which they became parameters: the same on all ranks
  std::unordered_map<const void*, Entry*> by_storage_;
  int64_t adopted_ = 0;
  uint64_t uses_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  bool failed_ = false;
};

}  // namespace ds::zero
