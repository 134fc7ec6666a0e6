// The nodes of autograd's graph, as each minor of LibTorch from 2.11 on owns them: by std::shared_ptr before 2.13, by
// c10::intrusive_ptr from then on. Differences between minors that concern this library are in core/torch_version
// alone.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <optional>
#include <utility>

namespace ds {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

// Owns a node, as edges of the graph do.
template <class Node = torch::autograd::Node>
using NodePointer = std::shared_ptr<Node>;

// Finds a node while something else owns it; null at first.
template <class Node>
using WeakNodePointer = std::weak_ptr<Node>;

// A new node. A long chain of them is destroyed without recursion.
template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return NodePointer<Node>(new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
}

#else

template <class Node = torch::autograd::Node>
using NodePointer = c10::intrusive_ptr<Node>;

template <class Node>
class WeakNodePointer {
 public:
  WeakNodePointer() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): as std::weak_ptr
  WeakNodePointer(const NodePointer<Node>& node) : node_(node) {}
  bool expired() const { return !node_ || node_->expired(); }
  NodePointer<Node> lock() const { return node_ ? node_->lock() : NodePointer<Node>(); }

 private:
  std::optional<c10::weak_intrusive_ptr<Node> > node_;
};

template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

#endif

}  // namespace ds
