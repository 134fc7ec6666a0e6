// The messages between the stages of a pipeline: activations forward, their gradients back, as tuples of tensors.
//
// Nothing waits here but the use of what has not arrived. Shapes and dtypes are agreed once, with the first
// micro-batch, and then checked by the sender; with dynamic shapes they travel ahead of every message. Between two
// ranks, messages of one direction travel in the order of the schedule; they do not wait for those of the other one
// (comm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dsengine/comm.h"
#include "dsengine/layer_spec.h"

namespace ds::pipeline {

struct MessageOptions {
  at::Device device = at::kCPU;
  bool dynamic_shape = false;
};

// The messages of one rank. Its methods are called in the order of the schedule's actions, from one thread.
class StageMessages {
 public:
  // Collective over `ranks`, which are those of the pipeline.
  StageMessages(comm::Communicator& ranks, MessageOptions options);
  // Does not wait: an exception may be on its way.
  ~StageMessages() = default;

  // Exchanges a first message with the ranks of neighbouring stages. `rank_of`: of each stage.
  // Collective. Before the first batch, where the transport needs it.
  void open(const std::vector<int>& rank_of);

  struct Route {
    int stage = 0;  // whose output it is, or the gradient of it
    int micro_batch = 0;
    int peer = 0;  // rank
  };
  // The tensors may not be changed until finish(). `from`: the layers that made them, for messages. Throws UsageError
  // when they differ from those of the first micro-batch.
  void send_activation(const Route& route, const Tensors& tensors, const Printable& from);
  void begin_activation(const Route& route);
  // The tensors that begin_activation() has begun to receive; those that require a gradient are marked so.
  Tensors activation(const Route& route);

  // Gradients of those inputs that require one, in order; undefined ones are sent as zeros.
  void send_gradient(const Route& route, const Tensors& of_inputs, const Tensors& gradients);
  // The gradient of the activation that was, or will have been, sent.
  void begin_gradient(const Route& route);
  Tensors gradient(const Route& route);

  // Copies of `tensors`, which `root` alone has, on all ranks. Collective.
  Tensors broadcast(const Tensors& tensors, int root);

  // Returns when all that was sent has left. Throws CommError.
  void finish();
  // Shapes may be others from the next batch on (reset_activation_shape of DeepSpeed). Free buffers of the old ones are
  // given back.
  void reset_shapes();
  // Does this for the shapes of passes without gradients alone.
  void reset_evaluation_shapes();
  // The communicators beside `ranks`.
  std::vector<std::shared_ptr<comm::Communicator>> groups() const { return {between_stages_}; }
  // Bytes of receive buffers, which are used again as soon as nothing refers to them.
  int64_t buffer_bytes() const;

 private:
  struct Shape {
    at::ScalarType dtype = at::kFloat;
    bool requires_grad = false;
    std::vector<int64_t> sizes;
    bool operator==(const Shape&) const = default;
  };
  using Shapes = std::vector<Shape>;
  enum class Content : uint8_t { kActivation, kGradient };
  struct Incoming {
    Content content = Content::kActivation;
    Route route;
    Shapes shapes;  // once it has started
    bool started = false;
    Tensors tensors;
    std::vector<comm::Work> works;
  };
  struct Outgoing {
    at::Tensor tensor;
    comm::Work work;
  };
  using MessageKey = std::pair<Content, std::pair<int, int>>;  // stage, micro-batch

  static Shapes shapes_of(const Tensors& tensors);
  static std::string text_of(const Shapes& shapes);
  static std::string label(Content content, const Route& route);
  void send(const at::Tensor& tensor, int peer, const std::string& label);
  at::Tensor to_numbers(const Shapes& shapes, const std::string& label) const;
  static Shapes from_numbers(const at::Tensor& numbers);
  void send_shapes(const Shapes& shapes, int peer, const std::string& label);
  Shapes receive_shapes(int peer, const std::string& label);
  void begin(Content content, const Route& route);
  bool knows_shapes(const Incoming& message) const;
  void start(Incoming& message);
  void start_until(const MessageKey& key);
  Tensors take(Content content, const Route& route);
  at::Tensor buffer(const Shape& shape);
  void drop_buffers();
  void forget_sent();

  comm::Communicator& ranks_;
  MessageOptions options_;
  std::shared_ptr<comm::Communicator> between_stages_;
  // Which shapes: those of a stage's outputs, with gradients or without (evaluation), sent or received.
  struct ShapesKey {
    int stage = 0;
    bool grad = false;
    bool sent = false;
    auto operator<=>(const ShapesKey&) const = default;
  };
  std::map<ShapesKey, Shapes> shapes_;
  std::map<std::pair<int, int>, Shapes> sent_;  // by stage and micro-batch, until the gradient comes
  std::map<MessageKey, Incoming> incoming_;
  std::map<int, std::deque<MessageKey>> waiting_;  // for each peer: begun, not started, in order
  std::deque<Outgoing> outgoing_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace ds::pipeline
