// The ranks along one axis of parallelism as one of them has them, and what it counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/split/split_tensor.h"
#include "dsengine/comm.h"
#include "dsengine/parallel.h"

namespace ds::parallel {

// Belongs to one rank and is used from one thread at a time, as its communicator; split tensors share it.
class Axis : public SplitAxis {
 public:
  explicit Axis(std::shared_ptr<comm::Communicator> communicator);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  at::Tensor joined_values(const at::Tensor& split) override;

  comm::Communicator& communicator() const { return *communicator_; }
  // Tells that the axis joins `ranks` of `job`, by which axes of two engines over the same ranks know each other.
  void join_ranks_of(const comm::Communicator* job, std::vector<int> ranks);
  // Whether the two join the same ranks in one order: by one communicator, or as join_ranks_of() says.
  bool has_ranks_of(const Axis& other) const;

  // Each rule's result is compared with that of the operator on joined tensors.
  bool verifies() const { return verifies_; }
  void verify(bool wanted) { verifies_ = wanted; }

  // Sums of row-split products leave each rank its part of the rows, and whole parameters are summed ones
  // (arXiv:2205.05198).
  bool cuts_sequences() const { return cuts_sequences_; }
  void cut_sequences(bool wanted) { cuts_sequences_ = wanted; }

  // Sums of gradients of column products' inputs run beside the products of their weights.
  bool overlaps() const { return overlaps_; }
  void overlap(bool wanted) { overlaps_ = wanted; }

  // `see` gets each plain tensor without a history that an operator reads beside split ones while gradients are on:
  // tokens, targets, masks, which are to be the same on all ranks.
  void watch_data(std::function<void(const at::Tensor&)> see) { see_data_ = std::move(see); }
  void note_data(const at::Tensor& plain) const {
    if (see_data_) see_data_(plain);
  }
  bool watches_data() const { return static_cast<bool>(see_data_); }

  // Counts, and logs an operator's first join (rank 0 of the axis) unless told not to.
  void note_join(const std::string& name, const std::vector<at::Tensor>& joined);
  std::vector<JoinedOperator> joined_operators() const;
  void reset_joined_operators() { joins_.clear(); }
  void tell_joins(bool wanted) { tells_joins_ = wanted; }

 private:
  std::shared_ptr<comm::Communicator> communicator_;
  const comm::Communicator* job_ = nullptr;  // only compared
  std::vector<int> job_ranks_;
  std::map<std::string, JoinedOperator> joins_;
  std::set<std::string> told_;  // operators
  bool verifies_ = false;
  bool tells_joins_ = true;
  std::function<void(const at::Tensor&)> see_data_;
  bool cuts_sequences_ = false;
  bool overlaps_ = false;
};

// Returns the axis of a split tensor.
std::shared_ptr<Axis> axis_of(const Placement& placement);

}  // namespace ds::parallel
