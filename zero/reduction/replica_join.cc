#include "zero/reduction/replica_join.h"

#include <utility>

namespace ds::zero {
namespace {

constexpr size_t kMostWires = 2;  // bounds the memory of copies

}  // namespace

void ReplicaJoin::add(comm::Communicator& replicas, const at::Tensor& gradient, at::Device device, at::ScalarType dtype,
                      std::string label) {
  Part& part = parts_.emplace_back(Part{gradient, gradient.to(device, dtype), {}});
  part.work = replicas.all_reduce(part.wire, op_, std::move(label));
  if (parts_.size() > kMostWires) finish_oldest();
}

void ReplicaJoin::finish() {
  while (!parts_.empty()) finish_oldest();
}

void ReplicaJoin::finish_oldest() {
  Part& part = parts_.front();
  part.work.wait();
  if (!part.wire.is_same(part.gradient)) part.gradient.copy_(part.wire);
  parts_.pop_front();
}

}  // namespace ds::zero
