// The messages between the stages of a pipeline: activations forward, their gradients back, as tuples of tensors.
//
// Nothing waits here but the use of what has not arrived. Shapes and dtypes are agreed once, with the first
// micro-batch, and then checked by the sender; with dynamic shapes they travel ahead of every message. Of a tensor that
// is split over a tensor axis a rank sends its part, and how the tensor is cut (split_activations.h). Between two
// ranks, messages of one direction travel in the order of the schedule; they do not wait for those of the other one
// (comm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dsengine/comm.h"
#include "dsengine/layer_spec.h"
#include "pipeline/split_activations.h"

namespace ds::pipeline {

// The receiver's knowledge of one tensor before that arrives.
struct MessageShape {
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  std::vector<int64_t> sizes;                       // of what travels
  std::optional<TensorSplit> split = std::nullopt;  // what travels is a rank's part of a split tensor
  bool operator==(const MessageShape&) const = default;
};
using MessageShapes = std::vector<MessageShape>;

// `splits` of the tensors; none: all are plain.
MessageShapes shapes_of(const Tensors& tensors, const TensorSplits& splits = {});

// Throws UsageError, which begins with `place`, for a tensor that cannot travel: one that is undefined, sparse or
// nested.
void require_dense(const Tensors& tensors, const Printable& place);
// Throws UsageError, which begins with `place`, where tensor `position` was changed in place since it had `version`
// (version_of()).
void require_unchanged(const at::Tensor& tensor, int64_t version, size_t position, const Printable& place);

// The shapes as text for messages: "Float [2, 3], Long [2]".
std::string text_of(const MessageShapes& shapes);

// The shapes as a tensor of numbers on `device`. Throws UsageError for more tensors or dimensions than fit; `label`
// names the message there.
at::Tensor to_numbers(const MessageShapes& shapes, at::Device device, const std::string& label);
// An uninitialized tensor that receives the result of to_numbers().
at::Tensor empty_numbers(at::Device device);
// The inverse of to_numbers().
MessageShapes from_numbers(const at::Tensor& numbers);

// Memory to receive tensors in, which is used again as soon as nothing else refers to it.
class ReceiveBuffers {
 public:
  // With `reuse` false every buffer is new memory, and none is kept.
  ReceiveBuffers(at::Device device, bool reuse) : device_(device), reuse_(reuse) {}

  // An uninitialized tensor of this shape.
  at::Tensor get(const MessageShape& shape);
  // Gives back the buffers that nothing refers to and that have none of these shapes.
  void keep_only(const MessageShapes& shapes);
  // The size of all buffers that are kept, used or free.
  int64_t bytes() const;

 private:
  at::Device device_;
  bool reuse_;
  std::vector<at::Tensor> buffers_;
};

struct MessageOptions {
  at::Device device = at::kCPU;
  bool dynamic_shape = false;
  std::shared_ptr<SplitAxis> axis = nullptr;  // the tensor axis of this rank's layers; null: they are not split
  // The ranks of the axis. With cut_activations each of them sends a piece of what is the same on all, where the
  // elements divide evenly, and the receivers gather it over their own axis; with cut_gradients on the way back.
  std::shared_ptr<comm::Communicator> axis_ranks = nullptr;
  bool cut_activations = false;
  bool cut_gradients = false;
};

// An activation that has arrived: leaves, and how the tensors are split of which they are parts.
struct Activation {
  Tensors tensors;
  TensorSplits splits;
};

// The messages of one rank. Its methods are called in the order of the schedule's actions, from one thread.
class StageMessages {
 public:
  // Makes the communicator that carries the messages. Collective over `ranks`, the ranks of the pipeline.
  StageMessages(comm::Communicator& ranks, const MessageOptions& options);
  // The destructor does not wait: an exception may be on its way.
  ~StageMessages() = default;

  // Exchanges a first message with the ranks of neighbouring stages. `rank_of`: the rank of each stage. Collective; to
  // be called before the first batch where the transport needs it.
  void open(const std::vector<int>& rank_of);

  struct Route {
    int stage = 0;  // the stage that made the activation, or whose activation's gradient it is
    int micro_batch = 0;
    int peer = 0;  // the rank at the other end
  };
  // Sends an activation, whose memory nobody may write before finish(): the message is read while the stage computes
  // on. `splits`: the tensors of which some are parts. `from`: the layers that made them, for error messages. Throws
  // UsageError when their shapes differ from those of the first micro-batch. This and what is called later throw
  // UsageError where a tensor was changed in place meanwhile.
  void send_activation(const Route& route, const Tensors& tensors, const TensorSplits& splits, const Printable& from);
  // Begins to receive an activation.
  void begin_activation(const Route& route);
  // Waits for and returns the tensors that begin_activation() has begun to receive; those that require a gradient are
  // marked so.
  Activation activation(const Route& route);

  // Sends the gradients of those `inputs` that require one, in order; undefined ones as zeros. Their memory is as that
  // of an activation.
  void send_gradient(const Route& route, const Activation& inputs, const Tensors& gradients);
  // Begins to receive the gradient of an activation, which this rank sends before it uses the gradient.
  void begin_gradient(const Route& route);
  // Waits for and returns the tensors that begin_gradient() has begun to receive.
  Tensors gradient(const Route& route);

  // Returns copies of `tensors`, which `root` alone has, on all ranks. Collective.
  Tensors broadcast(const Tensors& tensors, int root);

  // Waits until all that was sent has left. Throws CommError, and UsageError as send_activation() does.
  void finish();
  // Forgets all agreed shapes, so that they may be others from the next batch on (reset_activation_shape of DeepSpeed),
  // and gives back the free buffers of these shapes.
  void reset_shapes();
  // Forgets the agreed shapes of passes without gradients alone, and gives back their free buffers.
  void reset_evaluation_shapes();
  // The communicators that this object has made beside `ranks`.
  std::vector<std::shared_ptr<comm::Communicator>> groups() const { return {between_stages_}; }
  // The bytes of all receive buffers, used or free.
  int64_t buffer_bytes() const { return buffers_.bytes(); }

 private:
  enum class Content : uint8_t { kActivation, kGradient };
  struct Incoming {
    Content content = Content::kActivation;
    Route route;
    MessageShapes shapes;  // once it has started
    bool started = false;
    Tensors tensors;
    Tensors pieces;  // received in place of some of the tensors, which are then gathered; undefined for the others
    std::vector<comm::Work> works;
  };
  struct Outgoing {
    at::Tensor memory;               // that is sent
    std::optional<int64_t> version;  // when it was given; none: the memory is a copy, which nobody changes
    size_t position = 0;             // among the tensors of the message
    std::string from;                // the message and who made it
    comm::Work work;
  };
  using MessageKey = std::pair<Content, std::pair<int, int>>;  // stage, micro-batch

  static std::string label(Content content, const Route& route);
  void send(const at::Tensor& tensor, int peer, const std::string& label, size_t position = 0, std::string from = {});
  void end_oldest();
  void begin(Content content, const Route& route);
  bool knows_shapes(const Incoming& message) const;
  void start(Incoming& message);
  void start_until(const MessageKey& key);
  Activation take(Content content, const Route& route);

  comm::Communicator& ranks_;
  MessageOptions options_;
  std::shared_ptr<comm::Communicator> between_stages_;
  // Names agreed shapes: of a stage's outputs, in passes with gradients or without (evaluation), sent or received.
  struct ShapesKey {
    int stage = 0;
    bool grad = false;
    bool sent = false;
    auto operator<=>(const ShapesKey&) const = default;
  };
  std::map<ShapesKey, MessageShapes> shapes_;  // the agreed ones
  // The shapes of gradients to come for activations that were sent, by stage and micro-batch.
  std::map<std::pair<int, int>, MessageShapes> sent_;
  std::map<MessageKey, Incoming> incoming_;
  std::map<int, std::deque<MessageKey>> waiting_;  // for each peer: begun, not started, in order
  std::deque<Outgoing> outgoing_;
  ReceiveBuffers buffers_;  // not reused with dynamic shapes: few would ever fit again
};

}  // namespace ds::pipeline
