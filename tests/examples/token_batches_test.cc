#include "examples/gpt/token_batches.h"

#include <map>
#include <set>
#include <string>

#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace gpt {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

class TokenBatchesTest : public testing::Test {
 protected:
  static std::string bytes() {
    std::string text;
    for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7 % 251);
    return text;
  }
  ds::test::ScratchFolder folder_;
  TextCorpus corpus_ = TextCorpus::open(folder_.write("text", bytes()));
};

TEST_F(TokenBatchesTest, SequentialOrderFollowsTheFormula) {
  const int64_t B = 3;
  const int64_t T = 16;
  const int W = 4;
  const int64_t length = corpus_.size();
  for (int r = 0; r < W; ++r) {
    TokenBatches batches(corpus_,
                         {.order = Order::kSequential, .batch_size = B, .seq_len = T, .rank = r, .world_size = W});
    for (int64_t s = 0; s < 40; ++s) {
      for (int64_t b = 0; b < B; ++b)
        EXPECT_EQ(batches.offset(s * W * B, b), ((s * W + r) * B + b) * T % (length - T - 1));
    }
  }
}

TEST_F(TokenBatchesTest, ABatchIsNamedByItsPlacesInTheText) {
  const TokenBatches batches(corpus_,
                             {.order = Order::kSequential, .batch_size = 3, .seq_len = 16, .rank = 1, .world_size = 2});
  EXPECT_EQ(batches.name(12), "text from bytes 240, 256, 272");
}

TEST_F(TokenBatchesTest, TargetsAreTheNextTokens) {
  const std::string text = bytes();
  for (const Order order : {Order::kSequential, Order::kRandom}) {
    TokenBatches batches(corpus_, {.order = order, .batch_size = 2, .seq_len = 10, .rank = 1, .world_size = 2});
    const TokenBatch batch = batches.get(20);
    ASSERT_EQ(batch.data.sizes(), (at::IntArrayRef{2, 10}));
    ASSERT_EQ(batch.target.sizes(), (at::IntArrayRef{2, 10}));
    for (int64_t b = 0; b < 2; ++b) {
      const auto start = static_cast<size_t>(batches.offset(20, b));
      for (int64_t i = 0; i < 10; ++i) {
        EXPECT_EQ(batch.data[b][i].item<int64_t>(), static_cast<unsigned char>(text[start + static_cast<size_t>(i)]));
        EXPECT_EQ(batch.target[b][i].item<int64_t>(),
                  static_cast<unsigned char>(text[start + static_cast<size_t>(i) + 1]));
      }
    }
  }
}

TEST_F(TokenBatchesTest, RandomOrderDiffersBetweenRanksStepsAndSeedsOnly) {
  const auto offsets = [&](int rank, uint64_t seed) {
    TokenBatches batches(corpus_, {.batch_size = 2, .seq_len = 10, .rank = rank, .world_size = 2, .seed = seed});
    std::vector<int64_t> result;
    for (int64_t s = 0; s < 50; ++s) {
      for (int64_t b = 0; b < 2; ++b) result.push_back(batches.offset(4 * s, b));
    }
    return result;
  };
  EXPECT_EQ(offsets(0, 1), offsets(0, 1));
  EXPECT_NE(offsets(0, 1), offsets(1, 1));
  EXPECT_NE(offsets(0, 1), offsets(0, 2));
  const std::vector<int64_t> drawn = offsets(0, 1);
  EXPECT_GT(std::set<int64_t>(drawn.begin(), drawn.end()).size(), 85U) << "100 draws from 990 places";
  for (const int64_t offset : drawn) EXPECT_LT(offset, 990);
}

TEST_F(TokenBatchesTest, TheGlobalBatchDoesNotDependOnHowItIsSplit) {
  std::multiset<int64_t> one;
  std::multiset<int64_t> four;
  TokenBatches alone(corpus_, {.batch_size = 8, .seq_len = 10});
  for (int64_t b = 0; b < 8; ++b) one.insert(alone.offset(24, b));
  for (int rank = 0; rank < 4; ++rank) {
    TokenBatches part(corpus_, {.batch_size = 2, .seq_len = 10, .rank = rank, .world_size = 4});
    for (int64_t b = 0; b < 2; ++b) four.insert(part.offset(24, b));
  }
  EXPECT_EQ(one, four);
}

TEST_F(TokenBatchesTest, ARunThatGoesOnWithOtherRanksSeesTheNextSequences) {
  std::vector<int64_t> whole;
  TokenBatches alone(corpus_, {.batch_size = 4, .seq_len = 10});
  for (int64_t first = 0; first < 24; first += 4) {
    for (int64_t b = 0; b < 4; ++b) whole.push_back(alone.offset(first, b));
  }
  std::vector<int64_t> cut;
  for (int64_t first = 0; first < 12; first += 4) {  // two ranks, then three with one sequence each
    for (int rank = 0; rank < 2; ++rank) {
      TokenBatches part(corpus_, {.batch_size = 2, .seq_len = 10, .rank = rank, .world_size = 2});
      for (int64_t b = 0; b < 2; ++b) cut.push_back(part.offset(first, b));
    }
  }
  for (int64_t first = 12; first < 24; first += 3) {
    for (int rank = 0; rank < 3; ++rank) {
      TokenBatches part(corpus_, {.batch_size = 1, .seq_len = 10, .rank = rank, .world_size = 3});
      cut.push_back(part.offset(first, 0));
    }
  }
  EXPECT_EQ(whole, cut);
}

TEST_F(TokenBatchesTest, ATextTooShortIsRefused) {
  EXPECT_THAT([&] { TokenBatches(corpus_, {.seq_len = 999}); },
              ThrowsMessage<ds::ConfigError>(testing::AllOf(HasSubstr("--seq_len 999"), HasSubstr("1001"))));
  TokenBatches longest(corpus_, {.order = Order::kSequential, .seq_len = 998});
  EXPECT_EQ(longest.get(3).data.numel(), 998);
}

TEST_F(TokenBatchesTest, ATokenOutsideTheVocabularyIsNamed) {
  TokenBatches batches(corpus_, {.order = Order::kSequential, .seq_len = 100, .vocab = 128});
  EXPECT_THAT([&] { batches.get(0); },
              ThrowsMessage<ds::ConfigError>(testing::AllOf(HasSubstr("byte 133"), HasSubstr("--vocab 128"))));
}

}  // namespace
}  // namespace gpt
