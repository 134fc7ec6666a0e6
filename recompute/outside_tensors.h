// The tensors that a region reads and that need gradients, beside its inputs: parameters and what its function
// captures.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "core/memory/tensor_holders.h"
#include "core/torch_version/node.h"

namespace ds::recompute {

struct OutsideTensor {
  at::Tensor tensor;
  int64_t version = 0;         // when it was first read
  torch::autograd::Edge edge;  // where its gradient goes
};

// Sees what the operators of this thread read while it lives. An at::RecordFunction callback of its own beside
// core/op_interceptor: regions nested in a recomputation on a GPU are run by a thread of autograd, on which the
// interceptors of the thread that called backward() stay in force.
class OutsideRecorder {
 public:
  OutsideRecorder();  // throws UsageError where at::RecordFunction is disabled
  ~OutsideRecorder();
  OutsideRecorder(const OutsideRecorder&) = delete;
  OutsideRecorder& operator=(const OutsideRecorder&) = delete;

  void see(const at::Tensor& tensor);
  // What requires a gradient and was made before the recorder.
  std::vector<OutsideTensor> take();

 private:
  const uint64_t begin_;  // sequence number of autograd's nodes
  std::vector<OutsideTensor> tensors_;
  std::unordered_set<const at::TensorImpl*> known_;
};

// Note [Edges during a recomputation]
// The recomputation must neither accumulate into parameters nor run hooks nor walk into the graph outside: all that
// happens once, in the outer pass. So while this lives every outside tensor looks like an output of one node without
// parents, whose gradients are captured. It has to live until the inner pass is over, because saved tensors look for
// their node. Scopes nest, on one thread.
class OutsideCut {
 public:
  explicit OutsideCut(const std::vector<OutsideTensor>& tensors);
  ~OutsideCut();
  OutsideCut(const OutsideCut&) = delete;
  OutsideCut& operator=(const OutsideCut&) = delete;

  // Its input i belongs to tensor i.
  const NodePointer<>& node() const { return node_; }

 private:
  void put_back();

  const std::vector<OutsideTensor>& tensors_;
  NodePointer<> node_;
  std::vector<torch::autograd::Edge> before_;
};

}  // namespace ds::recompute
