#include "pipeline/stage_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/memory/tensor_holders.h"
#include "dsengine/comm.h"
#include "pipeline/schedule/message_route.h"

namespace ds::pipeline {
namespace {

// Shapes travel as int64 [kShapeNumbers]: count, then of each tensor the numbers of NumberPlace, the sizes and the
// blocks of its cut.
constexpr int64_t kMostTensors = 16;
constexpr int64_t kMostDimensions = 8;
constexpr int64_t kMostBlocks = 8;
struct NumberPlace {
  enum : int64_t { kDtype, kGradient, kDimensions, kSplit, kDim, kExtent, kRepeats, kGrain, kOrder, kBlocks, kPlaces };
};
enum SplitKind : int64_t { kPlain, kCut, kSummed };
constexpr int64_t kNumbersOfTensor = NumberPlace::kPlaces + kMostDimensions + kMostBlocks;
constexpr int64_t kShapeNumbers = 1 + kMostTensors * kNumbersOfTensor;

// Writes how a tensor is split.
void put_split(const std::optional<TensorSplit>& split, const std::string& label, int64_t* out) {
  if (!split) return;
  out[NumberPlace::kSplit] = split->cut ? kCut : kSummed;
  if (!split->cut) return;
  const Cut& cut = *split->cut;
  require(static_cast<int64_t>(cut.blocks.size()) <= kMostBlocks, label, ": a tensor is cut along dimension ", cut.dim,
          " in ", cut.blocks.size(), " blocks: expected at most ", kMostBlocks, " between two stages; return ",
          "ds::parallel::whole(output)");
  out[NumberPlace::kDim] = cut.dim;
  out[NumberPlace::kExtent] = split->sizes[static_cast<size_t>(cut.dim)];
  out[NumberPlace::kRepeats] = cut.repeats;
  out[NumberPlace::kGrain] = cut.grain;
  out[NumberPlace::kOrder] = static_cast<int64_t>(cut.order);
  out[NumberPlace::kBlocks] = static_cast<int64_t>(cut.blocks.size());
  std::copy(cut.blocks.begin(), cut.blocks.end(), out + NumberPlace::kPlaces + kMostDimensions);
}

// The inverse of put_split(). `sizes`: of the part.
std::optional<TensorSplit> split_in(const int64_t* in, const std::vector<int64_t>& sizes) {
  if (in[NumberPlace::kSplit] == kPlain) return std::nullopt;
  TensorSplit split{.sizes = sizes, .cut = std::nullopt};
  if (in[NumberPlace::kSplit] == kSummed) return split;
  const int64_t* const blocks = in + NumberPlace::kPlaces + kMostDimensions;
  split.cut = Cut{.dim = in[NumberPlace::kDim],
                  .blocks = {blocks, blocks + in[NumberPlace::kBlocks]},
                  .repeats = in[NumberPlace::kRepeats],
                  .grain = in[NumberPlace::kGrain],
                  .order = static_cast<PartOrder>(in[NumberPlace::kOrder])};
  split.sizes[static_cast<size_t>(split.cut->dim)] = in[NumberPlace::kExtent];
  return split;
}

bool has_shape(const at::Tensor& tensor, const MessageShape& shape) {
  return tensor.scalar_type() == shape.dtype && tensor.sizes() == shape.sizes;
}

// Returns in how many pieces tensors of this shape travel. `cuts`: what is the same on all ranks of the axis is cut.
int pieces_of(const MessageOptions& options, bool cuts, const MessageShape& shape) {
  if (!cuts || !options.axis_ranks || shape.split) return 1;
  const int64_t elements = c10::multiply_integers(shape.sizes);
  const int ranks = options.axis_ranks->size();
  return elements > 0 && elements % ranks == 0 ? ranks : 1;
}

// Returns what this rank sends of a tensor of this shape.
at::Tensor sent_piece(const MessageOptions& options, bool cuts, const at::Tensor& tensor, const MessageShape& shape) {
  const int64_t pieces = pieces_of(options, cuts, shape);
  if (pieces == 1) return tensor;
  const int64_t elements = tensor.numel() / pieces;
  return tensor.contiguous().view({-1}).narrow(0, options.axis_ranks->rank() * elements, elements);
}

// Sends the first message of one rank to another.
void open(comm::Communicator& ranks, int sender, int receiver, c10::Device device) {
  const bool sends = ranks.rank() == sender;
  if (!sends && ranks.rank() != receiver) return;
  const std::string label = cat("first message of rank ", sender, " to rank ", receiver);
  const at::Tensor token = at::full({1}, sends ? sender : -1, at::TensorOptions().dtype(at::kInt).device(device));
  (sends ? ranks.isend(token, receiver, 0, label) : ranks.irecv(token, sender, 0, label)).wait();
  ensure(token.item<int>() == sender, "the first message of a pair is its sender's number");
}

// Connects the ranks of a pipeline before its first batch: sends one element each way between all ranks that have
// neighbouring stages. `rank_of`: the rank of each stage. Returns when this rank's messages have arrived. Collective
// over `ranks`. Throws CommError.
//
// c10d's NCCL backend makes a communicator of two ranks with their first message, and blocks each of them there until
// the other has come. A schedule, which posts receives ahead of the computing that the other rank waits for, would
// stand still in its first batch. torch.distributed.pipelining exchanges a message at the start for the same reason.
//
// All ranks go through the pairs in one order: those of the lowest pair that is not done are both at it.
void open_pairs(const std::vector<int>& rank_of, comm::Communicator& ranks, c10::Device device) {
  for (const auto& [low, high] : neighbouring_ranks(rank_of)) {
    open(ranks, low, high, device);
    open(ranks, high, low, device);
  }
}

std::shared_ptr<comm::Communicator> for_messages(comm::Communicator& ranks) {
  std::vector<int> all(static_cast<size_t>(ranks.size()));
  std::iota(all.begin(), all.end(), 0);
  return ranks.new_group(all, "pipeline, between stages", comm::GroupUse::kMessages);
}

}  // namespace

MessageShapes shapes_of(const Tensors& tensors, const TensorSplits& splits) {
  MessageShapes shapes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    shapes.push_back({.dtype = tensors[i].scalar_type(),
                      .requires_grad = tensors[i].requires_grad(),
                      .sizes = tensors[i].sizes().vec(),
                      .split = splits.empty() ? std::nullopt : splits.at(i)});
  }
  return shapes;
}

void require_dense(const Tensors& tensors, const Printable& place) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool travels = tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested();
    require(travels, place, ": output ", i, ": expected a dense tensor, which can be sent to another stage, found ",
            !tensor.defined()    ? cat("an undefined one")
            : tensor.is_nested() ? cat("a nested one")
                                 : cat("one of layout ", tensor.layout()),
            ". Leave it out of what the layer returns, give torch::empty({0}) in its place, or make it dense ",
            "(to_dense())");
  }
}

void require_unchanged(const at::Tensor& tensor, int64_t version, size_t position, const Printable& place) {
  require(version_of(tensor) == version, place, ": tensor ", position, " was changed in place after it had been ",
          "returned: expected version ", version, ", found ", version_of(tensor),
          ". Another stage may still have to read it. Return a clone() of what a layer keeps and changes");
}

std::string text_of(const MessageShapes& shapes) {
  std::string text;
  for (const MessageShape& shape : shapes) {
    text += cat(text.empty() ? "" : ", ", c10::toString(shape.dtype), ' ', at::IntArrayRef(shape.sizes),
                shape.requires_grad ? " with gradient" : "");
    if (!shape.split) continue;
    text += cat(", a part of ", at::IntArrayRef(shape.split->sizes));
    if (shape.split->cut) text += cat(" along dimension ", shape.split->cut->dim);
  }
  return text;
}

at::Tensor to_numbers(const MessageShapes& shapes, at::Device device, const std::string& label) {
  require(static_cast<int64_t>(shapes.size()) <= kMostTensors, label, ": expected at most ", kMostTensors,
          " tensors between two stages, found ", shapes.size());
  at::Tensor numbers = at::zeros({kShapeNumbers}, at::kLong);
  auto* out = numbers.data_ptr<int64_t>();
  *out++ = static_cast<int64_t>(shapes.size());
  for (const MessageShape& shape : shapes) {
    require(static_cast<int64_t>(shape.sizes.size()) <= kMostDimensions, label, ": expected at most ", kMostDimensions,
            " dimensions, found ", shape.sizes.size());
    out[NumberPlace::kDtype] = static_cast<int64_t>(shape.dtype);
    out[NumberPlace::kGradient] = shape.requires_grad ? 1 : 0;
    out[NumberPlace::kDimensions] = static_cast<int64_t>(shape.sizes.size());
    std::copy(shape.sizes.begin(), shape.sizes.end(), out + NumberPlace::kPlaces);
    put_split(shape.split, label, out);
    out += kNumbersOfTensor;
  }
  return numbers.to(device);
}

at::Tensor empty_numbers(at::Device device) {
  return at::empty({kShapeNumbers}, at::TensorOptions().dtype(at::kLong).device(device));
}

MessageShapes from_numbers(const at::Tensor& tensor) {
  const at::Tensor numbers = tensor.cpu();
  const auto* in = numbers.const_data_ptr<int64_t>();
  MessageShapes shapes(static_cast<size_t>(*in++));
  for (MessageShape& shape : shapes) {
    const int64_t* const sizes = in + NumberPlace::kPlaces;
    shape = {.dtype = static_cast<at::ScalarType>(in[NumberPlace::kDtype]),
             .requires_grad = in[NumberPlace::kGradient] != 0,
             .sizes = {sizes, sizes + in[NumberPlace::kDimensions]}};
    shape.split = split_in(in, shape.sizes);
    in += kNumbersOfTensor;
  }
  return shapes;
}

at::Tensor ReceiveBuffers::get(const MessageShape& shape) {
  const auto options = at::TensorOptions().dtype(shape.dtype).device(device_);
  if (!reuse_) return at::empty(shape.sizes, options);
  for (const at::Tensor& kept : buffers_) {
    if (has_shape(kept, shape) && kept.storage().use_count() == 1) return kept.detach();
  }
  buffers_.push_back(at::empty(shape.sizes, options));
  return buffers_.back().detach();
}

void ReceiveBuffers::keep_only(const MessageShapes& shapes) {
  std::erase_if(buffers_, [&](const at::Tensor& kept) {
    if (kept.storage().use_count() > 1) return false;
    return std::none_of(shapes.begin(), shapes.end(),
                        [&](const MessageShape& shape) { return has_shape(kept, shape); });
  });
}

int64_t ReceiveBuffers::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : buffers_) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

StageMessages::StageMessages(comm::Communicator& ranks, const MessageOptions& options)
    : ranks_(ranks),
      options_(options),
      between_stages_(for_messages(ranks)),
      buffers_(options.device, /*reuse=*/!options.dynamic_shape) {}

void StageMessages::open(const std::vector<int>& rank_of) { open_pairs(rank_of, *between_stages_, options_.device); }

std::string StageMessages::label(Content content, const Route& route) {
  return cat(content == Content::kActivation ? "activation" : "gradient", " of stage ", route.stage, ", micro-batch ",
             route.micro_batch);
}

void StageMessages::send(const at::Tensor& tensor, int peer, const std::string& label, size_t position,
                         std::string from) {
  while (!outgoing_.empty() && outgoing_.front().work.is_completed()) end_oldest();
  const at::Tensor whole = tensor.contiguous();
  outgoing_.push_back({.memory = whole,
                       .version = whole.is_same(tensor) ? std::optional(version_of(tensor)) : std::nullopt,
                       .position = position,
                       .from = std::move(from),
                       .work = between_stages_->isend(whole, peer, 0, label)});
}

void StageMessages::end_oldest() {
  const Outgoing sent = std::move(outgoing_.front());
  outgoing_.pop_front();
  sent.work.wait();
  if (sent.version) require_unchanged(sent.memory, *sent.version, sent.position, sent.from);
}

void StageMessages::finish() {
  while (!outgoing_.empty()) end_oldest();
}

Tensors StageMessages::broadcast(const Tensors& tensors, int root) {
  const bool mine = ranks_.rank() == root;
  if (mine) require_dense(tensors, "the last stage, for all ranks (broadcast_logits)");
  const at::Tensor numbers =
      mine ? to_numbers(shapes_of(tensors), options_.device, "broadcast") : empty_numbers(options_.device);
  ranks_.broadcast(numbers, root, "shapes of a broadcast").wait();
  Tensors result;
  for (const MessageShape& shape : from_numbers(numbers)) {
    const auto options = at::TensorOptions().dtype(shape.dtype).device(options_.device);
    result.push_back(mine ? tensors[result.size()].contiguous() : at::empty(shape.sizes, options));
    ranks_.broadcast(result.back(), root, "broadcast").wait();
  }
  return result;
}

void StageMessages::send_activation(const Route& route, const Tensors& tensors, const TensorSplits& splits,
                                    const Printable& layers) {
  const std::string what = label(Content::kActivation, route);
  const MessageShapes shapes = shapes_of(tensors, splits);
  const auto [known, first] = shapes_.try_emplace({route.stage, at::GradMode::is_enabled(), true}, shapes);
  if (first || options_.dynamic_shape) {
    send(to_numbers(shapes, options_.device, what), route.peer, cat("shapes of ", what));
  } else {
    const MessageShapes& usual = known->second;
    require(usual == shapes, what, ", made by ", layers, ": expected (", lazy([&] { return text_of(usual); }),
            ") as in the first micro-batch, found (", lazy([&] { return text_of(shapes); }),
            "). Give all micro-batches one shape (",
            "\"dataloader_drop_last\": true), or set PipelineOptions.dynamic_shape; where all of them have another ",
            "shape from a batch on, call reset_activation_shape() on all ranks before it");
  }
  const std::string from = cat(what, ", made by ", layers);
  for (size_t i = 0; i < tensors.size(); ++i) {
    send(sent_piece(options_, options_.cut_activations, tensors[i].detach(), shapes[i]), route.peer, what, i, from);
  }
  if (!at::GradMode::is_enabled()) return;
  MessageShapes& back = sent_[{route.stage, route.micro_batch}];
  std::copy_if(shapes.begin(), shapes.end(), std::back_inserter(back),
               [](const MessageShape& s) { return s.requires_grad; });
}

void StageMessages::begin_activation(const Route& route) { begin(Content::kActivation, route); }

Activation StageMessages::activation(const Route& route) { return take(Content::kActivation, route); }

void StageMessages::send_gradient(const Route& route, const Activation& inputs, const Tensors& gradients) {
  const std::string what = label(Content::kGradient, route);
  const MessageShapes shapes = shapes_of(inputs.tensors, inputs.splits);
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (!shapes[i].requires_grad) continue;
    const at::Tensor gradient = gradients[i].defined() ? gradients[i] : at::zeros_like(inputs.tensors[i]);
    send(sent_piece(options_, options_.cut_gradients, gradient, shapes[i]), route.peer, what, i, what);
  }
}

void StageMessages::begin_gradient(const Route& route) { begin(Content::kGradient, route); }

Tensors StageMessages::gradient(const Route& route) { return take(Content::kGradient, route).tensors; }

// Whatever is begun behind a message that has not started waits with it: order is what the sender goes by.
void StageMessages::begin(Content content, const Route& route) {
  const MessageKey key = {content, {route.stage, route.micro_batch}};
  const auto [found, inserted] =
      incoming_.emplace(key, Incoming{.content = content, .route = route, .shapes = {}, .tensors = {}, .works = {}});
  ensure(inserted, "a message is received once");
  if (waiting_[route.peer].empty() && knows_shapes(found->second)) {
    start(found->second);
  } else {
    waiting_[route.peer].push_back(key);
  }
}

bool StageMessages::knows_shapes(const Incoming& message) const {
  if (message.content == Content::kGradient) return sent_.contains({message.route.stage, message.route.micro_batch});
  return !options_.dynamic_shape && shapes_.contains({message.route.stage, at::GradMode::is_enabled(), false});
}

void StageMessages::start(Incoming& message) {
  const std::string what = label(message.content, message.route);
  const int peer = message.route.peer;
  if (message.content == Content::kActivation) {
    const ShapesKey key = {message.route.stage, at::GradMode::is_enabled(), false};
    if (!knows_shapes(message)) {
      const at::Tensor numbers = empty_numbers(options_.device);
      between_stages_->irecv(numbers, peer, 0, cat("shapes of ", what)).wait();
      shapes_[key] = from_numbers(numbers);
    }
    message.shapes = shapes_.at(key);
  } else {
    const auto sent = sent_.find({message.route.stage, message.route.micro_batch});
    ensure(sent != sent_.end(), "a gradient follows its activation");
    message.shapes = std::move(sent->second);
    sent_.erase(sent);
  }
  const bool cuts = message.content == Content::kActivation ? options_.cut_activations : options_.cut_gradients;
  for (const MessageShape& shape : message.shapes) {
    message.tensors.push_back(buffers_.get(shape));
    const int64_t pieces = pieces_of(options_, cuts, shape);
    message.pieces.push_back(pieces == 1 ? at::Tensor()
                                         : buffers_.get({.dtype = shape.dtype,
                                                         .requires_grad = false,
                                                         .sizes = {message.tensors.back().numel() / pieces}}));
    const at::Tensor& received = pieces == 1 ? message.tensors.back() : message.pieces.back();
    message.works.push_back(between_stages_->irecv(received, peer, 0, what));
  }
  message.started = true;
}

void StageMessages::start_until(const MessageKey& key) {
  std::deque<MessageKey>& queue = waiting_[incoming_.at(key).route.peer];
  while (!incoming_.at(key).started) {
    ensure(!queue.empty(), "a message that has not started waits");
    start(incoming_.at(queue.front()));
    queue.pop_front();
  }
}

Activation StageMessages::take(Content content, const Route& route) {
  const MessageKey key = {content, {route.stage, route.micro_batch}};
  ensure(incoming_.contains(key), "a message is begun before it is used");
  start_until(key);
  Incoming message = std::move(incoming_.at(key));
  incoming_.erase(key);
  for (const comm::Work& work : message.works) work.wait();
  // In one order on all ranks of the axis, which run one schedule.
  for (size_t i = 0; i < message.pieces.size(); ++i) {
    if (!message.pieces[i].defined()) continue;
    options_.axis_ranks->all_gather(message.tensors[i].view({-1}), message.pieces[i], label(content, route)).wait();
  }
  Activation taken;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    taken.tensors.push_back(message.tensors[i].detach());
    taken.splits.push_back(message.shapes[i].split);
    if (content == Content::kActivation && message.shapes[i].requires_grad)
      taken.tensors.back().set_requires_grad(true);
  }
  return taken;
}

void StageMessages::reset_shapes() {
  shapes_.clear();
  buffers_.keep_only({});
}

void StageMessages::reset_evaluation_shapes() {
  std::erase_if(shapes_, [](const auto& entry) { return !entry.first.grad; });
  MessageShapes agreed;
  for (const auto& [key, shapes] : shapes_) agreed.insert(agreed.end(), shapes.begin(), shapes.end());
  buffers_.keep_only(agreed);
}

}  // namespace ds::pipeline
