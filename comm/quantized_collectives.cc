#include "comm/quantized_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "comm/collective.h"
#include "comm/subgroups.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::comm {
namespace {

void require_quantizable(const char* what, const std::string& label, const char* role, const at::Tensor& tensor) {
  require(tensor.defined() && tensor.is_contiguous() &&
              (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 ||
               tensor.scalar_type() == at::kHalf),
          what, " (", label, "): expected a contiguous ", role, " of float32, bfloat16 or float16, found ",
          describe(tensor));
}

void require_parts(const char* what, const std::string& label, const at::Tensor& whole, const at::Tensor& part,
                   int ranks) {
  require(whole.numel() == part.numel() * ranks && whole.device() == part.device(), what, " (", label, "): expected ",
          ranks, " times the elements on one device, found ", describe(whole), " against ", describe(part));
}

at::Tensor empty_bytes(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

// Part `index` of a flat tensor of parts of one size.
at::Tensor nth_part(const at::Tensor& flat, int64_t index, int64_t size) { return flat.narrow(0, index * size, size); }

class QuantizedGather final : public WorkState {
 public:
  // `fill` writes the own part.
  template <class Fill>
  QuantizedGather(const at::Tensor& output, const BlockCodec& codec, Communicator& communicator, std::string label,
                  const Fill& fill)
      : output_(output), codec_(codec), ranks_(communicator.size()) {
    const int64_t bytes = codec.encoded_bytes(output.numel() / ranks_);
    encoded_ = empty_bytes(bytes * ranks_, output);
    const at::Tensor own = nth_part(encoded_, communicator.rank(), bytes);
    fill(own);
    arrived_ = communicator.all_gather(encoded_, own, std::move(label));
  }

  bool is_completed() override { return !encoded_.defined(); }
  bool is_ready() override { return is_completed() || arrived_.is_ready(); }

  void wait() override {
    if (is_completed()) return;
    const at::NoGradGuard no_grad;
    arrived_.wait();
    const at::Tensor flat = output_.view(-1);
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      codec_.decode(nth_part(encoded_, rank, encoded_.numel() / ranks_), nth_part(flat, rank, flat.numel() / ranks_));
    }
    encoded_.reset();
    output_.reset();
  }

 private:
  at::Tensor output_;
  at::Tensor encoded_;  // undefined once decoded
  BlockCodec codec_;
  int64_t ranks_;
  Work arrived_;
};

// One all-to-all of encoded tensors, equal in size for all ranks.
struct Exchange {
  at::Tensor sent;
  at::Tensor received;
  Work work;

  void start(Communicator& communicator, const std::string& label) {
    received = empty_bytes(sent.numel(), sent);
    work = communicator.all_to_all(received, sent, {}, {}, label);
  }
};

// Note [order of the parts]: rank node * L + place sends, inside its node, to each place the parts of this place in all
// nodes, one after another, so `sent` is [place][node] while the input is [node][place]: encoding puts the parts in
// that order, and nothing is moved. What arrives is [source place][node]. Adding over places gives [node], which is the
// order of the second exchange; what arrives then is [source node], and adding over nodes gives the rank's own part.
class QuantizedReduction final : public WorkState {
 public:
  struct Levels {
    std::shared_ptr<Communicator> inside;  // null: one rank
    std::shared_ptr<Communicator> across;  // null: one rank
    int64_t places;
    int64_t nodes;
  };

  QuantizedReduction(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const BlockCodec& codec,
                     Levels levels, std::string label)
      : output_(output), codec_(codec), levels_(std::move(levels)), label_(std::move(label)) {
    divisor_ = op == ReduceOp::kAvg ? static_cast<int>(levels_.places * levels_.nodes) : 1;
    part_bytes_ = codec.encoded_bytes(output.numel());
    exchange_.sent = empty_bytes(part_bytes_ * levels_.places * levels_.nodes, input);
    const at::Tensor flat = input.view(-1);
    for (int64_t node = 0; node < levels_.nodes; ++node) {
      for (int64_t place = 0; place < levels_.places; ++place) {
        codec.encode(nth_part(flat, node * levels_.places + place, output.numel()),
                     nth_part(exchange_.sent, place * levels_.nodes + node, part_bytes_));
      }
    }
    exchange_.start(levels_.inside ? *levels_.inside : *levels_.across, label_);
  }

  bool is_completed() override { return !output_.defined(); }

  bool is_ready() override {
    if (is_completed()) return true;
    if (!exchange_.work.is_ready()) return false;
    if (!has_second()) return true;
    try {
      start_second();
    } catch (const std::exception&) {
      return true;  // wait() throws it
    }
    return exchange_.work.is_ready();
  }

  void wait() override {
    if (is_completed()) return;
    const at::NoGradGuard no_grad;
    if (has_second()) start_second();
    exchange_.work.wait();
    const int64_t sources = levels_.across ? levels_.nodes : levels_.places;
    codec_.decode_sum(received_parts(sources, 0, 1), output_, divisor_);
    exchange_ = {};
    output_.reset();
  }

 private:
  // `count` received parts: number first, first + step, ...
  std::vector<at::Tensor> received_parts(int64_t count, int64_t first, int64_t step) const {
    std::vector<at::Tensor> parts;
    for (int64_t i = 0; i < count; ++i) parts.push_back(nth_part(exchange_.received, first + i * step, part_bytes_));
    return parts;
  }

  bool has_second() const { return levels_.inside && levels_.across; }

  // Where it throws, the next call comes to the same end.
  void start_second() {
    const at::NoGradGuard no_grad;
    exchange_.work.wait();
    Exchange next = between_nodes();
    next.start(*levels_.across, label_);
    exchange_ = std::move(next);
    levels_.inside = nullptr;
  }

  Exchange between_nodes() {
    Exchange next{.sent = empty_bytes(part_bytes_ * levels_.nodes, exchange_.received)};
    const at::Tensor sum = at::empty({output_.numel()}, output_.options().dtype(at::kFloat));
    for (int64_t node = 0; node < levels_.nodes; ++node) {
      codec_.decode_sum(received_parts(levels_.places, node, levels_.nodes), sum);
      codec_.encode(sum, nth_part(next.sent, node, part_bytes_));
    }
    return next;
  }

  at::Tensor output_;  // undefined once written
  BlockCodec codec_;
  Levels levels_;
  std::string label_;
  int divisor_;
  int64_t part_bytes_;
  Exchange exchange_;
};

std::shared_ptr<Communicator> unless_alone(std::shared_ptr<Communicator> communicator) {
  return communicator && communicator->size() > 1 ? std::move(communicator) : nullptr;
}

}  // namespace

Work quantized_all_gather(const at::Tensor& output, const at::Tensor& input, int bits, Communicator& communicator,
                          std::string label) {
  constexpr const char* kWhat = "quantized_all_gather";
  const at::NoGradGuard no_grad;
  const BlockCodec codec(bits);
  require_quantizable(kWhat, label, "input", input);
  require_quantizable(kWhat, label, "output", output);
  require_parts(kWhat, label, output, input, communicator.size());
  if (communicator.size() == 1) {
    output.view(-1).copy_(input.view(-1));
    return {};
  }
  return Work(std::make_shared<QuantizedGather>(output, codec, communicator, std::move(label),
                                                [&](const at::Tensor& own) { codec.encode(input, own); }));
}

Work encoded_all_gather(const at::Tensor& output, const at::Tensor& encoded, int bits, Communicator& communicator,
                        std::string label) {
  constexpr const char* kWhat = "encoded_all_gather";
  const at::NoGradGuard no_grad;
  const BlockCodec codec(bits);
  require_quantizable(kWhat, label, "output", output);
  require(output.numel() % communicator.size() == 0 && encoded.defined() &&
              encoded.numel() == codec.encoded_bytes(output.numel() / communicator.size()),
          kWhat, " (", label, "): expected the encoded bytes of an even part of ", describe(output), ", found ",
          describe(encoded));
  return Work(std::make_shared<QuantizedGather>(output, codec, communicator, std::move(label),
                                                [&](const at::Tensor& own) { own.copy_(encoded); }));
}

QuantizedReducer::QuantizedReducer(std::shared_ptr<Communicator> inside, std::shared_ptr<Communicator> across, int bits)
    : codec_(bits) {
  require(inside || across, "QuantizedReducer: expected a communicator inside the node, across nodes, or both, ",
          "found none");
  inside_size_ = inside ? inside->size() : 1;
  across_size_ = across ? across->size() : 1;
  rank_ = (across ? across->rank() : 0) * inside_size_ + (inside ? inside->rank() : 0);
  size_ = inside_size_ * across_size_;
  inside_ = unless_alone(std::move(inside));
  across_ = unless_alone(std::move(across));
}

Work QuantizedReducer::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                      std::string label) const {
  constexpr const char* kWhat = "quantized reduce_scatter";
  const at::NoGradGuard no_grad;
  require(op == ReduceOp::kSum || op == ReduceOp::kAvg, kWhat, " (", label, "): expected sum or avg, found ",
          name_of(op));
  require_quantizable(kWhat, label, "input", input);
  require_quantizable(kWhat, label, "output", output);
  require_parts(kWhat, label, input, output, size_);
  if (size_ == 1) {
    output.view(-1).copy_(input.view(-1));
    return {};
  }
  return Work(std::make_shared<QuantizedReduction>(
      output, input, op, codec_, QuantizedReduction::Levels{inside_, across_, inside_size_, across_size_},
      std::move(label)));
}

QuantizedReducer make_quantized_reducer(const std::shared_ptr<Communicator>& world, int ranks_per_node, int bits) {
  require(ranks_per_node > 0 && world->size() % ranks_per_node == 0,
          "make_quantized_reducer: expected ranks per node that divide the ", world->size(), " ranks of group ",
          world->name(), ", found ", ranks_per_node);
  if (ranks_per_node == 1 || ranks_per_node == world->size()) return QuantizedReducer(nullptr, world, bits);
  auto inside = own_group(*world, consecutive_ranks(world->size(), ranks_per_node), cat(world->name(), ".node"));
  auto across = own_group(*world, ranks_of_one_place(world->size(), ranks_per_node), cat(world->name(), ".place"));
  return QuantizedReducer(std::move(inside), std::move(across), bits);
}

}  // namespace ds::comm
