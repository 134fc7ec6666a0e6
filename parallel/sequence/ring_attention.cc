#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text_hash.h"
#include "parallel/sequence/pieces_attention.h"
#include "parallel/sequence/score_block.h"

namespace ds::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Note [Which keys travel]
// At hop h a rank attends to the keys and values of the rank h before it, where its queries see some of them; those
// that no query sees are not sent. They come from the rank before, which has had them at the hop before, or from their
// owner where that rank does not need them. In the backward pass the gradients of keys go the same way on: each rank
// adds its share to what comes from the rank before it, and passes the sum to the next rank if that has a share too,
// else home.

uint64_t digest_of(const at::Tensor& documents) {
  if (!documents.defined()) return 0;
  const at::Tensor numbers = documents.contiguous();
  return fnv1a({static_cast<const char*>(numbers.const_data_ptr()), numbers.nbytes()});
}

// What the passes of one attention share; the tensors are saved by autograd.
struct Ring : torch::CustomClassHolder {
  Ring(PositionPieces of_ranks, SeenPositions seen_by_queries, double of_scores, comm::Communicator* of_group)
      : pieces(std::move(of_ranks)),
        seen(std::move(seen_by_queries)),
        scale(of_scores),
        group(of_group),
        needs(seen_ranks(pieces, seen)),
        digest(digest_of(seen.documents)) {}

  int rank() const { return group == nullptr ? 0 : group->rank(); }
  int size() const { return group == nullptr ? 1 : group->size(); }
  // The rank that is `steps` behind another one; before it, where they are negative.
  int after(int rank, int steps) const { return (rank + steps + size()) % size(); }
  // The rank whose keys and values are here after `hop` hops.
  int source(int hop) const { return after(rank(), -hop); }
  // Whether the rank that is `hop` behind `owner` sees some of its keys.
  bool reaches(int owner, int hop) const {
    return hop < size() && needs[static_cast<size_t>(after(owner, hop))][static_cast<size_t>(owner)];
  }
  // Whether any keys are needed `hop` ranks behind their owner.
  bool any_reach(int hop) const {
    for (int owner = 0; owner < size(); ++owner) {
      if (reaches(owner, hop)) return true;
    }
    return false;
  }
  // Names what travels. Ranks compare labels, so that other documents on a rank are an error.
  std::string label(const char* what) const {
    std::string result = cat(what, " of ring_attention");
    if (seen.documents.defined()) result += cat(", documents with digest ", digest);
    return result;
  }
  std::vector<ScoreBlock> blocks(int hop) const {
    return seen_blocks(pieces.of_rank(rank()), pieces.of_rank(source(hop)), seen);
  }

  PositionPieces pieces;
  SeenPositions seen;
  double scale;
  comm::Communicator* group;             // null: one rank has the whole sequence
  std::vector<std::vector<bool>> needs;  // seen_ranks()
  uint64_t digest;                       // of the documents
};

// Tensors on their way between ranks: what each rank sends to others and gets from them, in rank order.
class Exchange {
 public:
  explicit Exchange(const Ring& ring)
      : sent_(static_cast<size_t>(ring.size())), received_(static_cast<size_t>(ring.size())) {}

  void send(int rank, const at::Tensor& tensor) { sent_[static_cast<size_t>(rank)] = tensor; }
  void receive(int rank, std::vector<int64_t> sizes) { received_[static_cast<size_t>(rank)] = std::move(sizes); }

  void begin(const Ring& ring, const at::TensorOptions& options, const std::string& label) {
    std::vector<int64_t> sent;
    std::vector<int64_t> received;
    std::vector<at::Tensor> leaving;
    int64_t arriving = 0;
    for (size_t rank = 0; rank < sent_.size(); ++rank) {
      sent.push_back(sent_[rank] ? sent_[rank]->numel() : 0);
      if (sent_[rank]) leaving.push_back(sent_[rank]->contiguous().view(-1));
      received.push_back(received_[rank] ? c10::multiply_integers(*received_[rank]) : 0);
      arriving += received.back();
    }
    leaving_ = leaving.empty() ? at::empty({0}, options) : leaving.size() == 1 ? leaving[0] : at::cat(leaving);
    arriving_ = at::empty({arriving}, options);
    work_ = ring.group->all_to_all(arriving_, leaving_, received, sent, label);
  }

  // Waits; nothing where none was begun.
  void finish() {
    if (!arriving_.defined()) return;
    work_.wait();
    leaving_ = at::Tensor();
    for (std::optional<at::Tensor>& tensor : sent_) tensor.reset();
  }

  // What came from a rank; undefined where nothing did.
  at::Tensor from(int rank) const {
    int64_t begin = 0;
    for (int before = 0; before < rank; ++before) begin += elements(before);
    const auto& sizes = received_[static_cast<size_t>(rank)];
    return sizes && arriving_.defined() ? arriving_.narrow(0, begin, elements(rank)).view(*sizes) : at::Tensor();
  }

 private:
  int64_t elements(int rank) const {
    const auto& sizes = received_[static_cast<size_t>(rank)];
    return sizes ? c10::multiply_integers(*sizes) : 0;
  }

  std::vector<std::optional<at::Tensor>> sent_;
  std::vector<std::optional<std::vector<int64_t>>> received_;
  at::Tensor arriving_, leaving_;
  comm::Work work_;
};

// The sizes of keys and values together, [2, batch, heads, rows, channels], with the rows of a rank.
std::vector<int64_t> sizes_with_rows(const at::Tensor& like, const Ring& ring, int rank) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[3] = ring.pieces.rows(rank);
  return sizes;
}

// Begins to bring the keys and values that are needed at `hop`: see Note [Which keys travel]. `held`: what is here at
// the hop before.
Exchange begin_hop(const Ring& ring, const at::Tensor& own, const at::Tensor& held, int hop) {
  Exchange result(ring);
  const int owner = ring.source(hop - 1);
  // The first hop is the owner's own.
  if (ring.reaches(owner, hop - 1) && ring.reaches(owner, hop)) result.send(ring.after(ring.rank(), 1), held);
  if (!ring.reaches(ring.rank(), hop - 1) && ring.reaches(ring.rank(), hop)) {
    result.send(ring.after(ring.rank(), hop), own);
  }
  const int source = ring.source(hop);
  if (ring.reaches(source, hop)) {
    const int sender = ring.reaches(source, hop - 1) ? ring.after(ring.rank(), -1) : source;
    result.receive(sender, sizes_with_rows(own, ring, source));
  }
  result.begin(ring, own.options(), ring.label("keys and values"));
  return result;
}

// Sends keys and values around: calls `use` for every hop, with its number and the keys and values that are here then
// (undefined where this rank's queries see none), while those of the next hop are on their way.
template <class Use>
void for_each_hop(const Ring& ring, const at::Tensor& keys, const at::Tensor& values, const Use& use) {
  const at::Tensor own = at::stack({keys, values});
  at::Tensor held = own;
  for (int hop = 0; hop < ring.size(); ++hop) {
    Exchange next(ring);
    if (ring.any_reach(hop + 1)) next = begin_hop(ring, own, held, hop + 1);
    use(hop, held);
    next.finish();
    const int source = ring.source(hop + 1);
    held = next.from(ring.reaches(source, hop) ? ring.after(ring.rank(), -1) : source);
  }
}

// The gradients of keys and values on their way home.
class KeyGradients {
 public:
  explicit KeyGradients(const Ring& ring) : ring_(ring) {}

  // Passes on this rank's share of the gradient of the keys that it has at a hop; undefined where it has none. Every
  // rank calls it for every hop.
  void pass_on(int hop, const at::Tensor& share) {
    if (hop == 0) {
      home_ = share;
      return;
    }
    arrive(share);
    if (!ring_.any_reach(hop)) return;
    const int before = ring_.after(ring_.rank(), -1);
    const int source = ring_.source(hop);
    const int next = ring_.source(hop + 1);
    moving_.emplace(ring_);
    if (ring_.reaches(source, hop)) {
      moving_->send(ring_.reaches(source, hop + 1) ? ring_.after(ring_.rank(), 1) : source, share);
    }
    if (ring_.reaches(next, hop) && ring_.reaches(next, hop + 1)) {
      moving_->receive(before, sizes_with_rows(home_, ring_, next));
      from_before_ = before;
    }
    if (ring_.reaches(ring_.rank(), hop) && !ring_.reaches(ring_.rank(), hop + 1)) {
      coming_home_ = ring_.after(ring_.rank(), hop);
      moving_->receive(*coming_home_, home_.sizes().vec());
    }
    moving_->begin(ring_, home_.options(), ring_.label("gradients of keys and values"));
  }

  // The gradient of this rank's keys and values: the sum over all ranks.
  at::Tensor sum() {
    arrive({});
    return home_;
  }

 private:
  void arrive(const at::Tensor& share) {
    if (!moving_) return;
    moving_->finish();
    if (from_before_) share.add_(moving_->from(*from_before_));
    if (coming_home_) home_.add_(moving_->from(*coming_home_));
    moving_.reset();
    from_before_.reset();
    coming_home_.reset();
  }

  const Ring& ring_;
  at::Tensor home_;
  std::optional<Exchange> moving_;
  std::optional<int> from_before_, coming_home_;  // the ranks from which sums are on their way
};

AttentionInputs inputs_of(const Ring& ring, const at::Tensor& q, const at::Tensor& keys_values) {
  return {.query = q, .key = keys_values[0], .value = keys_values[1], .scale = ring.scale};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<Ring>& ring) {
    SeenSum sum(q);
    for_each_hop(*ring, k, v, [&](int hop, const at::Tensor& keys_values) {
      if (!keys_values.defined()) return;
      const AttentionInputs inputs = inputs_of(*ring, q, keys_values);
      for (const ScoreBlock& block : ring->blocks(hop)) sum.add(inputs, block);
    });
    const at::Tensor out = sum.out().to(q.scalar_type());
    context->save_for_backward({q, k, v, out, sum.log_sum()});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(), "ring_attention: expected a backward pass without create_graph, its kernels ",
            "have no second derivative");
    const variable_list saved = context->get_saved_variables();
    const auto ring = c10::static_intrusive_pointer_cast<Ring>(context->saved_data["ring"].toCapsule());
    const at::Tensor& q = saved[0];
    const AttentionResult result{.out = saved[3], .log_sum = saved[4], .gradient = gradients[0].contiguous()};
    const at::TensorOptions wide = q.options().dtype(sum_type(q));
    const at::Tensor of_query = at::zeros(q.sizes(), wide);
    KeyGradients of_keys(*ring);
    for_each_hop(*ring, saved[1], saved[2], [&](int hop, const at::Tensor& keys_values) {
      at::Tensor share;
      if (keys_values.defined()) {
        share = at::zeros(keys_values.sizes(), wide);
        const AttentionInputs inputs = inputs_of(*ring, q, keys_values);
        for (const ScoreBlock& block : ring->blocks(hop)) {
          add_block_gradients(inputs, result, block, {.query = of_query, .key = share[0], .value = share[1]});
        }
      }
      of_keys.pass_on(hop, share);
    });
    const at::Tensor of_keys_values = of_keys.sum().to(q.scalar_type());
    return {of_query.to(q.scalar_type()), of_keys_values[0], of_keys_values[1], {}};
  }
};

}  // namespace

at::Tensor ring_over_pieces(const AttentionInputs& inputs, PositionPieces pieces, SeenPositions seen,
                            comm::Communicator* group) {
  return RingAttention::apply(inputs.query, inputs.key, inputs.value,
                              c10::make_intrusive<Ring>(std::move(pieces), std::move(seen), inputs.scale, group));
}

}  // namespace ds::parallel
