#include "ops/chunked_loss.h"

#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/recorded_operator.h"

namespace ds::ops {
namespace {

constexpr int64_t kFewestRows = 128;  // fewer make products of matrices slow
constexpr int64_t kHostLogits = int64_t{1} << 23;
constexpr int64_t kHostNarrowLogits = int64_t{1} << 24;  // of 16 bits: adding up weight gradients takes a larger share
constexpr int64_t kDeviceLogits = int64_t{1} << 27;

int64_t rows_of_a_chunk(const ChunkedLossInput& input) {
  const int64_t rows = std::max<int64_t>(input.hidden.size(0), 1);
  if (input.options.chunk_rows > 0) return std::min(rows, input.options.chunk_rows);
  const bool narrow = input.type != wide_type(input.type);
  const int64_t logits = !input.hidden.is_cpu() ? kDeviceLogits : narrow ? kHostNarrowLogits : kHostLogits;
  const int64_t most = std::max(kFewestRows, logits / std::max<int64_t>(input.weight.size(0), 1));
  // Equal chunks: a short last one would be as slow as few rows are.
  const int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;
}

// The buffers of one chunk are those of all.
class Chunks {
 public:
  Chunks(const ChunkedLossInput& input, const WantedGradients& wanted)
      : options_(input.options),
        wanted_(wanted),
        type_(input.type),
        wide_(wide_type(input.type)),
        hidden_(input.hidden),
        weight_(input.weight.to(input.type)),
        targets_(input.targets),
        classes_(input.weight.size(0)),
        rows_(rows_of_a_chunk(input)) {
    if (input.bias.defined()) bias_ = input.bias.to(input.type);
    const at::TensorOptions wide = hidden_.options().dtype(wide_);
    logits_ = at::empty({rows_, classes_}, wide);
    log_shares_ = at::empty({rows_, classes_}, wide);
    if (type_ != wide_) narrow_ = at::empty({rows_, classes_}, wide.dtype(type_));
    ignored_ = targets_.eq(options_.ignore_index);
    safe_targets_ = targets_.masked_fill(ignored_, 0);
    result_.total = at::zeros({}, wide);
    result_.counted = targets_.ne(options_.ignore_index).sum();
    if (wanted.hidden) result_.hidden_gradient = at::empty(hidden_.sizes(), wide.dtype(type_));
    if (wanted.weight && hidden_.size(0) == 0) result_.weight_gradient = at::zeros(weight_.sizes(), wide);
    if (wanted.bias) result_.bias_gradient = at::zeros({classes_}, wide);
  }

  ChunkedLoss run() {
    for (int64_t begin = 0; begin < hidden_.size(0); begin += rows_) {
      chunk(begin, std::min(rows_, hidden_.size(0) - begin));
    }
    return std::move(result_);
  }

 private:
  void chunk(int64_t begin, int64_t rows) {
    const at::Tensor x = hidden_.narrow(0, begin, rows).to(type_);
    const at::Tensor target = safe_targets_.narrow(0, begin, rows).unsqueeze(1);
    const at::Tensor ignored = ignored_.narrow(0, begin, rows);
    const at::Tensor logits = make_logits(x, rows);
    at::Tensor log_shares = log_shares_.narrow(0, 0, rows);
    at::_log_softmax_out(log_shares, options_.logit_softcap ? logits.mul(*options_.logit_softcap) : logits, 1,
                         /*half_to_float=*/false);
    result_.total.add_(losses(log_shares, target).masked_fill_(ignored, 0).sum());
    if (!wanted_.any()) return;
    const at::Tensor gradient = logit_gradient(logits, log_shares.exp_(), target, ignored);
    add_gradients(begin, x, gradient);
  }

  // Scaled and, with a cap c, as tanh(logits / c): what the cap's derivative is made of.
  at::Tensor make_logits(const at::Tensor& x, int64_t rows) {
    at::Tensor logits = logits_.narrow(0, 0, rows);
    at::Tensor product = narrow_.defined() ? narrow_.narrow(0, 0, rows) : logits;
    if (bias_.defined()) {
      at::addmm_out(product, bias_, x, weight_.t());
    } else {
      at::mm_out(product, x, weight_.t());
    }
    if (narrow_.defined()) logits.copy_(product);
    if (options_.logit_scale != 1.0) logits.mul_(options_.logit_scale);
    if (options_.logit_softcap) logits.div_(*options_.logit_softcap).tanh_();
    return logits;
  }

  at::Tensor losses(const at::Tensor& log_shares, const at::Tensor& target) const {
    const double smoothing = options_.label_smoothing;
    at::Tensor result = log_shares.gather(1, target).squeeze(1).mul_(smoothing - 1.0);
    if (smoothing != 0.0) result.sub_(log_shares.sum(1), smoothing / static_cast<double>(classes_));
    return result;
  }

  // Softmax minus the target's distribution, in the memory of `shares`.
  at::Tensor logit_gradient(const at::Tensor& logits, const at::Tensor& shares, const at::Tensor& target,
                            const at::Tensor& ignored) const {
    const double smoothing = options_.label_smoothing;
    shares.scatter_add_(1, target, at::full(target.sizes(), smoothing - 1.0, shares.options()));
    if (smoothing != 0.0) shares.sub_(smoothing / static_cast<double>(classes_));
    shares.masked_fill_(ignored.unsqueeze(1), 0);
    if (options_.logit_softcap) shares.mul_(logits.square_().neg_().add_(1.0));
    return shares;
  }

  void add_gradients(int64_t begin, const at::Tensor& x, const at::Tensor& gradient) {
    if (wanted_.bias) result_.bias_gradient.add_(gradient.sum(0));
    if (!wanted_.hidden && !wanted_.weight) return;
    at::Tensor factor = gradient;
    if (narrow_.defined()) factor = narrow_.narrow(0, 0, x.size(0)).copy_(gradient);
    if (wanted_.hidden) {
      at::Tensor rows = result_.hidden_gradient.narrow(0, begin, x.size(0));
      at::mm_out(rows, factor, weight_);
    }
    if (wanted_.weight) add_weight_gradient(x, factor, gradient);
  }

  void add_weight_gradient(const at::Tensor& x, const at::Tensor& factor, const at::Tensor& gradient) {
    at::Tensor& sum = result_.weight_gradient;
    const bool first = !sum.defined();
    if (type_ != at::kBFloat16) {  // also of float16, whose range sums over rows may leave
      const at::Tensor wide_x = x.to(wide_);
      first ? void(sum = at::mm(gradient.t(), wide_x)) : void(sum.addmm_(gradient.t(), wide_x));
      return;
    }
    // A chunk's own sum is made in float32 and rounded once; sums of chunks are kept in float32.
    if (x.size(0) == hidden_.size(0)) {
      sum = at::mm(factor.t(), x);
      return;
    }
    if (first) product_ = at::empty(weight_.sizes(), weight_.options());
    at::mm_out(product_, factor.t(), x);
    first ? void(sum = product_.to(wide_)) : void(sum.add_(product_));
  }

  const LinearCrossEntropyOptions& options_;
  const WantedGradients wanted_;
  at::ScalarType type_, wide_;
  at::Tensor hidden_, weight_, bias_, targets_;
  int64_t classes_, rows_;
  at::Tensor logits_, log_shares_;  // [rows_, V] in wide_
  at::Tensor narrow_;               // [rows_, V] in type_; undefined where that is wide_
  at::Tensor product_;              // [V, H]
  at::Tensor ignored_, safe_targets_;
  ChunkedLoss result_;
};

}  // namespace

// One operator, whatever the number of rows: ranks have different ones, and at stage 3 each use counts.
ChunkedLoss chunked_loss(const ChunkedLossInput& input, const WantedGradients& wanted) {
  const RecordedOperator recorded("dsengine::linear_cross_entropy", {input.hidden, input.weight, input.bias});
  return Chunks(input, wanted).run();
}

}  // namespace ds::ops
