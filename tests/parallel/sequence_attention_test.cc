// Attention over a cut sequence, beside scaled_dot_product_attention of the whole in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "dsengine/sequence_attention.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/grid.h"

namespace ds::parallel {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kPositions = 24;

// Which positions see one another, and how they lie.
struct SightCase {
  std::string name;
  SequenceAttentionOptions options;
};

at::Tensor two_rows_of_documents() {
  return torch::stack({torch::arange(kPositions).div(7, "floor"), torch::arange(kPositions).div(10, "floor") * 3});
}

std::vector<SightCase> sights() {
  const at::Tensor packed = torch::arange(kPositions).div(9, "floor");
  return {{"full", {}},
          {"causal", {.causal = true}},
          {"causal, scale", {.causal = true, .scale = 0.3}},
          {"window", {.window = 5}},
          {"causal window", {.causal = true, .window = 3}},
          {"documents", {.documents = packed}},
          {"causal documents of each row", {.causal = true, .documents = two_rows_of_documents()}},
          {"documents that come again, window", {.window = 7, .documents = torch::arange(kPositions) % 3}}};
}

at::Tensor mask_of(const SequenceAttentionOptions& options) {
  const at::Tensor back = torch::arange(kPositions).unsqueeze(1) - torch::arange(kPositions);
  at::Tensor mask = torch::ones_like(back, torch::kBool);
  if (options.causal) mask = mask & back.ge(0);
  if (options.window > 0) mask = mask & back.abs().lt(options.window);
  mask = mask.unsqueeze(0).unsqueeze(0);
  if (!options.documents.defined()) return mask;
  const at::Tensor rows = options.documents.dim() == 1 ? options.documents.unsqueeze(0) : options.documents;
  return mask & rows.unsqueeze(2).eq(rows.unsqueeze(1)).unsqueeze(1);
}

at::Tensor whole_input(int which, int64_t heads, at::ScalarType type) {
  const at::Tensor numbers = torch::arange(2 * heads * kPositions * 4, torch::kDouble) * (0.37 + 0.11 * which);
  return (torch::sin(numbers) * 1.5).view({2, heads, kPositions, 4}).to(type);
}

struct Values {
  at::Tensor out;
  std::vector<at::Tensor> gradients;  // of q, k, v
};

at::Tensor loss_weights(at::ScalarType type) { return whole_input(3, 1, type); }

Values values_of_one_process(const SequenceAttentionOptions& options, int64_t heads, int64_t key_heads,
                             at::ScalarType type) {
  std::vector<at::Tensor> inputs = {whole_input(0, heads, type), whole_input(1, key_heads, type),
                                    whole_input(2, key_heads, type)};
  for (at::Tensor& input : inputs) input.requires_grad_();
  const at::Tensor out = at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask_of(options), 0.0, false,
                                                          options.scale, heads != key_heads);
  return {out.detach(), torch::autograd::grad({(out * loss_weights(type)).sum()}, inputs)};
}

using Attention = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, comm::Communicator&,
                                           const SequenceAttentionOptions&)>;

void expect_values_of_one_process(const Attention& attention, const SequenceAttentionOptions& options, int ranks,
                                  int64_t heads, int64_t key_heads, at::ScalarType type, double bound) {
  const Values expected = values_of_one_process(options, heads, key_heads, type);
  test::run_ranks(ranks, [&](comm::Communicator& group) {
    const auto own = [&](const at::Tensor& whole) { return shard_sequence(whole, group, 2, options.layout); };
    std::vector<at::Tensor> inputs = {own(whole_input(0, heads, type)), own(whole_input(1, key_heads, type)),
                                      own(whole_input(2, key_heads, type))};
    for (at::Tensor& input : inputs) input.requires_grad_();
    const at::Tensor out = attention(inputs[0], inputs[1], inputs[2], group, options);
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_LT(relative_error(out, own(expected.out)), bound);
    const auto gradients = torch::autograd::grad({(out * own(loss_weights(type))).sum()}, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LT(relative_error(gradients[i], own(expected.gradients[i])), bound) << "qkv"[i];
    }
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(attention(inputs[0], inputs[1], inputs[2], group, options).requires_grad());
  });
}

// Both ways, all orders, one to four ranks, in float64; as many heads of keys as of queries, fewer, and one.
TEST(SequenceAttention, IsThatOfOneProcess) {
  const std::vector<SequenceOrder> orders = {SequenceOrder::kContiguous, SequenceOrder::kZigzag};
  for (const auto& [sight, ranks, order, key_heads] :
       ds::test::grid_sample(2, sights(), std::vector<int>{2, 3, 4, 1}, orders, std::vector<int64_t>{2, 6, 1})) {
    SCOPED_TRACE(::testing::Message() << sight.name << ", " << ranks << " ranks, order " << static_cast<int>(order)
                                      << ", " << key_heads << " heads of keys");
    SequenceAttentionOptions options = sight.options;
    options.layout.order = order;
    expect_values_of_one_process(ring_attention, options, ranks, 6, key_heads, torch::kDouble, 1e-12);
    expect_values_of_one_process(ulysses_attention, options, ranks, 6, key_heads, torch::kDouble, 1e-12);
  }
}

TEST(SequenceAttention, TakesUnevenPieces) {
  for (const SightCase& sight : sights()) {
    SCOPED_TRACE(sight.name);
    SequenceAttentionOptions options = sight.options;
    options.layout.lengths = {5, 12, 7};
    expect_values_of_one_process(ring_attention, options, 3, 4, 2, torch::kDouble, 1e-12);
    expect_values_of_one_process(ulysses_attention, options, 3, 4, 2, torch::kDouble, 1e-12);
  }
}

TEST(SequenceAttention, SixteenBitsAndFloat) {
  const SequenceAttentionOptions options{.causal = true, .layout = {.order = SequenceOrder::kZigzag, .lengths = {}}};
  for (const auto& attention : {Attention(ring_attention), Attention(ulysses_attention)}) {
    expect_values_of_one_process(attention, options, 2, 4, 2, torch::kFloat, 2e-6);
    expect_values_of_one_process(attention, options, 4, 4, 2, torch::kBFloat16, 2e-2);
  }
}

// A block in which some queries see nothing, on the first hop and on later ones: LibTorch's kernel says 0 for the sum
// of their weights.
TEST(SequenceAttention, QueriesThatSeeNothingOfABlock) {
  SequenceAttentionOptions options{.causal = true, .window = 2};
  options.documents = torch::arange(kPositions).div(5, "floor");
  options.layout.order = SequenceOrder::kZigzag;
  expect_values_of_one_process(ring_attention, options, 4, 2, 2, torch::kFloat, 2e-6);
}

TEST(SequenceAttention, JoinsWhatItHasCut) {
  for (const SequenceLayout& layout : {SequenceLayout{}, SequenceLayout{.order = SequenceOrder::kZigzag, .lengths = {}},
                                       SequenceLayout{.order = SequenceOrder::kContiguous, .lengths = {4, 20}}}) {
    test::run_ranks(2, [&](comm::Communicator& group) {
      const at::Tensor whole = whole_input(0, 1, torch::kDouble).requires_grad_();
      const at::Tensor own = shard_sequence(whole, group, 2, layout);
      const at::Tensor positions = sequence_positions(kPositions, group, layout);
      EXPECT_TRUE(torch::equal(own, whole.index_select(2, positions)));
      const at::Tensor joined = join_sequence(own, group, -2, layout);
      EXPECT_TRUE(torch::equal(joined, whole));
      const at::Tensor gradient = torch::autograd::grad({joined.pow(2).sum()}, {whole})[0];
      const at::Tensor expected = torch::zeros_like(whole).index_copy(2, positions, own.detach() * 4);  // of two ranks
      EXPECT_LT(relative_error(gradient, expected), 1e-12);
    });
  }
}

// The bytes that a rank has sent since the last call.
int64_t bytes_sent(comm::Communicator& group) {
  const int64_t bytes = group.counters().total_bytes_sent();
  group.reset_counters();
  return bytes;
}

at::Tensor own_input(comm::Communicator& group, int which, int64_t heads, SequenceOrder order) {
  return shard_sequence(whole_input(which, heads, torch::kFloat), group, 2, {.order = order, .lengths = {}})
      .requires_grad_();
}

// The bytes of DeepSpeed-Ulysses (arXiv:2309.14509): 4/W of the activations each way.
TEST(SequenceAttention, UlyssesSendsTheBytesOfItsFormula) {
  constexpr int kRanks = 4;
  test::run_ranks(kRanks, [&](comm::Communicator& group) {
    const at::Tensor q = own_input(group, 0, 4, SequenceOrder::kContiguous);
    const int64_t activations = q.numel() * q.element_size();
    bytes_sent(group);
    const at::Tensor out = ulysses_attention(q, q, q, group, {.causal = true});
    EXPECT_EQ(bytes_sent(group), 4 * activations * (kRanks - 1) / kRanks);
    out.sum().backward();
    EXPECT_EQ(bytes_sent(group), 4 * activations * (kRanks - 1) / kRanks);
  });
}

struct RingBytes {
  std::string name;
  SequenceAttentionOptions options;
  // For each rank, to how many others its keys and values go.
  std::vector<int64_t> readers;
};

// Keys and values go once to each rank that sees some of them, and so do their gradients back: c (W-1) from each rank
// where all see all, and only what is seen otherwise.
TEST(SequenceAttention, RingSendsWhatIsSeen) {
  constexpr int kRanks = 4;  // of 6 positions each, or of twice 3
  const auto documents = [](int64_t length) { return torch::arange(kPositions).div(length, "floor"); };
  const SequenceLayout zigzag{.order = SequenceOrder::kZigzag, .lengths = {}};
  const std::vector<RingBytes> cases = {
      {"full", {}, {3, 3, 3, 3}},
      {"causal", {.causal = true}, {3, 2, 1, 0}},
      {"causal, zigzag", {.causal = true, .layout = zigzag}, {3, 3, 3, 3}},
      {"a document of each rank", {.documents = documents(6)}, {0, 0, 0, 0}},
      {"documents of two ranks", {.documents = documents(12)}, {1, 1, 1, 1}},
      {"causal documents of two ranks", {.causal = true, .documents = documents(12)}, {1, 0, 1, 0}},
      // 0 to 7, 8 to 15, 16 to 23: ranks 0 and 1; 1 and 2; 2 and 3.
      {"documents over borders", {.documents = documents(8)}, {1, 2, 2, 1}},
      // Of ranks 0 and 3 alone, and one of the two between: what ranks 1 and 2 do not see passes them by.
      {"a document that comes again",
       {.documents = torch::cat(
            {torch::zeros({6}, torch::kLong), torch::ones({12}, torch::kLong), torch::zeros({6}, torch::kLong)})},
       {1, 1, 1, 1}},
      {"window", {.causal = true, .window = 4}, {1, 1, 1, 0}},
      // Pieces of 3, rank 3 has the two in the middle: 0 1 2 3 3 2 1 0.
      {"documents of two pieces, zigzag", {.documents = documents(6), .layout = zigzag}, {1, 1, 1, 1}}};
  for (const RingBytes& one : cases) {
    SCOPED_TRACE(one.name);
    std::vector<int64_t> forward(kRanks, 0);
    std::vector<int64_t> backward(kRanks, 0);
    test::run_ranks(kRanks, [&](comm::Communicator& group) {
      const at::Tensor q = own_input(group, 0, 4, one.options.layout.order);
      const at::Tensor k = own_input(group, 1, 2, one.options.layout.order);
      const at::Tensor v = own_input(group, 2, 2, one.options.layout.order);
      bytes_sent(group);
      const at::Tensor out = ring_attention(q, k, v, group, one.options);
      forward[static_cast<size_t>(group.rank())] = bytes_sent(group);
      out.sum().backward();
      backward[static_cast<size_t>(group.rank())] = bytes_sent(group);
    });
    const int64_t keys_values = int64_t{2} * 2 * 2 * (kPositions / kRanks) * 4 * 4;
    const auto total = [](const std::vector<int64_t>& values) {
      return std::accumulate(values.begin(), values.end(), int64_t{0});
    };
    EXPECT_EQ(total(forward), total(one.readers) * keys_values);
    // In order, each rank passes on what it has had.
    if (one.name == "causal")
      EXPECT_THAT(forward, ::testing::ElementsAre(keys_values, 2 * keys_values, 3 * keys_values, 0));
    // Keys and values once more, and their gradients, which are float32 as well.
    EXPECT_EQ(total(backward), 2 * total(one.readers) * keys_values);
  }
}

// Over shared memory ranks compare what they call.
TEST(SequenceAttention, OtherDocumentsOnARankAreAnError) {
  EXPECT_THAT(
      [] {
        test::run_ranks(2, [](comm::Communicator& group) {
          const at::Tensor q = torch::ones({1, 1, 2, 4});
          const at::Tensor documents = torch::zeros({4}, torch::kLong);
          ring_attention(q, q, q, group, {.documents = documents + group.rank()});
        });
      },
      ThrowsMessage<test::RankFailure>(HasSubstr("documents with digest")));
}

// Dropout of one rank's heads: the mean of many draws is the attention without it.
TEST(SequenceAttention, DropsWeightsOverHeads) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const at::Tensor q = shard_sequence(whole_input(0, 2, torch::kDouble), group, 2);
    const at::Tensor expected = ulysses_attention(q, q, q, group);
    at::Tensor sum = torch::zeros_like(q);
    constexpr int kDraws = 400;
    for (int draw = 0; draw < kDraws; ++draw) sum += ulysses_attention(q, q, q, group, {.dropout = 0.2});
    EXPECT_GT(relative_error(ulysses_attention(q, q, q, group, {.dropout = 0.2}), expected), 0.02);
    EXPECT_LT(relative_error(sum / kDraws, expected), 0.05);
  });
}

TEST(SequenceAttention, RefusesWhatCannotBe) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const at::Tensor q = torch::ones({1, 1, 5, 4});
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    EXPECT_THAT([&] { ulysses_attention(q, q, q, group); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("a head of queries for each of the 2 ranks"),
                                                HasSubstr("found 1; use ring_attention"))));
    EXPECT_THAT([&] { ring_attention(q, q, q, group, {.dropout = 0.1}); }, says("use ulysses_attention"));
    EXPECT_THAT([&] { ring_attention(q, q, q.narrow(2, 0, 4), group); }, says("k and v of equal sizes"));
    EXPECT_THAT([&] { ring_attention(q, q.to(torch::kDouble), q.to(torch::kDouble), group); }, says("of one dtype"));
    EXPECT_THAT([&] { ring_attention(q.squeeze(0), q, q, group); }, says("[batch, heads, positions, channels]"));
    EXPECT_THAT(
        [&] {
          ring_attention(q.expand({1, 3, 5, 4}), q.expand({1, 2, 5, 4}), q.expand({1, 2, 5, 4}), group);
        },
        says("a multiple of those of k and v, found 3 and 2"));
    EXPECT_THAT([&] { ring_attention(q, q, q, group, {.layout = {.order = SequenceOrder::kZigzag, .lengths = {}}}); },
                says("an even number of positions"));
    EXPECT_THAT([&] { ring_attention(q, q, q, group, {.documents = torch::zeros({5}, torch::kLong)}); },
                says("documents: expected int64 [10] or [1, 10] on the CPU"));
    EXPECT_THAT([&] { ring_attention(q, q, q, group, {.window = -1}); }, says("window: expected 0 or more"));
    EXPECT_THAT(
        [&] {
          ring_attention(q, q, q, group, {.layout = {.lengths = {4, 6}}});
        },
        says("positions that layout.lengths gives to rank"));
    EXPECT_THAT([&] { shard_sequence(torch::ones({1, 5}), group); }, says("found 5; pad the sequence to 6 or give"));
    EXPECT_THAT([&] { shard_sequence(torch::ones({1, 6}), group, 1, {.lengths = {2, 2}}); }, says("add up to the 6"));
    const at::Tensor trained = torch::ones({1, 1, 4, 4}).requires_grad_();
    const at::Tensor out = ring_attention(trained, trained, trained, group);
    EXPECT_THAT([&] { torch::autograd::grad({out.sum()}, {trained}, {}, true, /*create_graph=*/true); },
                says("without create_graph"));
  });
}

}  // namespace
}  // namespace ds::parallel
