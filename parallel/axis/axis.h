// The ranks along one axis of parallelism as one of them has them, and what it counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/split_tensor.h"
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

  // Counts, and logs an operator's first join (rank 0 of the axis).
  void note_join(const std::string& name, const std::vector<at::Tensor>& joined);
  std::vector<JoinedOperator> joined_operators() const;
  void reset_joined_operators() { joins_.clear(); }

 private:
  std::shared_ptr<comm::Communicator> communicator_;
  std::map<std::string, JoinedOperator> joins_;
  std::set<std::string> told_;  // operators
  bool verifies_ = false;
  bool cuts_sequences_ = false;
  bool overlaps_ = false;
};

// That of a split tensor.
std::shared_ptr<Axis> axis_of(const Placement& placement);

}  // namespace ds::parallel
