// Megatron-LM's files, and its order of samples, number for number.
//
// The digests are those of the published algorithm (gpt_dataset.py and helpers.cpp of megatron/core/datasets) in plain
// numpy: documents and samples shuffled by RandomState, samples found by a walk along the documents.
#include "dsengine/token_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "data/token_order.h"
#include "dsengine/loader.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"

namespace ds::data {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// FNV-1a over whole numbers.
class Digest {
 public:
  void take(int64_t number) { value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x100000001b3; }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

std::vector<int32_t> lengths_of(int32_t documents) {
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < documents; ++i) lengths.push_back(static_cast<int32_t>(int64_t{i} * 7919 % 97));
  return lengths;
}

struct KnownOrder {
  int32_t documents;
  TokenOrderOptions options;
  int64_t epochs;
  int64_t samples;
  uint64_t digest;  // of the pieces of the first 10,000 samples
};

TEST(TokenOrder, IsThatOfMegatron) {
  const std::vector<KnownOrder> known = {
      {300, {.sequence_length = 16, .seed = 1234}, 1, 897, 0x5e30b925be8209ae},
      {300, {.sequence_length = 16, .num_samples = 10000, .seed = 1234}, 12, 10767, 0x88de253b5a15a902},
      {1000, {.sequence_length = 32, .num_samples = 10000, .seed = 7}, 7, 10504, 0x61c536745db7bc5a},
      {50, {.sequence_length = 8, .num_samples = 700, .seed = 3}, 3, 872, 0x0990fd455aee3ec6},
      {50, {.sequence_length = 8, .num_samples = 575, .seed = 3}, 2, 581, 0x33d66caeec7fd27e},
  };
  for (const KnownOrder& expected : known) {
    const TokenOrder order(lengths_of(expected.documents), expected.options);
    EXPECT_EQ(order.epochs(), expected.epochs);
    EXPECT_EQ(order.size(), expected.samples);
    Digest digest;
    for (int64_t sample = 0; sample < std::min<int64_t>(order.size(), 10000); ++sample) {
      int64_t tokens = 0;
      for (const TokenOrder::Piece& piece : order.pieces(sample)) {
        digest.take(piece.document);
        digest.take(piece.first);
        digest.take(piece.count);
        tokens += piece.count;
      }
      EXPECT_EQ(tokens, expected.options.sequence_length + 1);
    }
    EXPECT_EQ(digest.value(), expected.digest) << expected.documents << " documents";
  }
}

TEST(TokenOrder, BlendsAsMegatronDoes) {
  const auto digest_of = [](const std::vector<double>& weights) {
    const BlendOrder order = blend_order(weights, 10000);
    Digest digest;
    for (size_t i = 0; i < order.datasets.size(); ++i) {
      digest.take(order.datasets[i]);
      digest.take(order.samples[i]);
    }
    return digest.value();
  };
  EXPECT_EQ(digest_of({0.3, 0.5, 0.2}), 0x86ee3c1d70fc07ed);
  EXPECT_EQ(digest_of({1, 2, 4, 8}), 0xe86307879508fdd1);
  EXPECT_THAT([] { blend_order({1, 0}, 3); }, ThrowsMessage<UsageError>(HasSubstr("positive weights")));
}

TEST(TokenOrder, DocumentsThatMakeNoSampleAreAnError) {
  EXPECT_THAT([] { TokenOrder(lengths_of(3), {.sequence_length = 200}); },
              ThrowsMessage<UsageError>(HasSubstr("89 tokens are less than a sample of 200")));
}

// Documents of which token t of document d is 100 d + t, as Megatron-LM writes them for a small vocabulary.
std::string write_documents(const test::ScratchFolder& folder, const std::string& name,
                            const std::vector<int32_t>& lengths) {
  std::vector<std::vector<uint16_t>> rows;
  for (size_t document = 0; document < lengths.size(); ++document) {
    rows.emplace_back();
    for (int32_t token = 0; token < lengths[document]; ++token) {
      rows.back().push_back(static_cast<uint16_t>(100 * document + static_cast<size_t>(token)));
    }
  }
  std::string path = test::write_indexed_dataset<uint16_t>(folder / name, rows);
  constexpr std::streamoff kDtype = 17;
  std::fstream(path + ".idx", std::ios::binary | std::ios::in | std::ios::out).seekp(kDtype).put(8);
  return path;
}

TEST(TokenDataset, ReadsTheTokensOfTheOrder) {
  const test::ScratchFolder folder;
  const std::vector<int32_t> lengths = lengths_of(50);
  const TokenDataset tokens(write_documents(folder, "corpus", lengths),
                            {.sequence_length = 8, .num_samples = 700, .seed = 3});
  const TokenOrder order(lengths, {.sequence_length = 8, .num_samples = 700, .seed = 3});
  ASSERT_EQ(tokens.size(), 872U);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<int64_t> expected;
    for (const TokenOrder::Piece& piece : order.pieces(static_cast<int64_t>(i))) {
      for (int64_t t = 0; t < piece.count; ++t) expected.push_back(100 * piece.document + piece.first + t);
    }
    const TokenSample sample = tokens.get(i);
    const at::Tensor all = torch::tensor(expected);
    ASSERT_TRUE(torch::equal(sample.tokens, all.narrow(0, 0, 8))) << i;
    ASSERT_TRUE(torch::equal(sample.labels, all.narrow(0, 1, 8))) << i;
  }
}

TEST(TokenDataset, ASplitUsesItsDocumentsAlone) {
  const test::ScratchFolder folder;
  const std::string path = write_documents(folder, "corpus", lengths_of(50));
  const TokenDataset valid(path, {.sequence_length = 8, .first_document = 40, .end_document = 50});
  for (size_t i = 0; i < valid.size(); ++i) {
    EXPECT_GE(valid.get(i).tokens.min().item<int64_t>(), 4000);
  }
  EXPECT_THAT([&] { TokenDataset(path, {.sequence_length = 8, .first_document = 40, .end_document = 51}); },
              ThrowsMessage<UsageError>(HasSubstr("end_document = 51")));
}

TEST(TokenDataset, ABlendIsReadByALoaderWithWorkersInItsOrder) {
  const test::ScratchFolder folder;
  const std::string path = write_documents(folder, "corpus", lengths_of(50));
  const TokenDataset a(path, {.sequence_length = 8, .end_document = 25});
  const TokenDataset b(path, {.sequence_length = 8, .num_samples = 90, .first_document = 25});
  const BlendedTokens blend({a, b}, {1, 3}, 100);
  std::map<size_t, int> counts;
  for (size_t i = 0; i < blend.size(); ++i) ++counts[blend.dataset_of(i)];
  EXPECT_EQ(counts[0], 25);
  EXPECT_EQ(counts[1], 75);
  Loader loader(blend, {.batch_size = 5, .shuffle = false, .reading = {.num_workers = 2}});
  size_t next = 0;
  for (auto& batch : loader) {
    for (int64_t i = 0; i < 5; ++i) EXPECT_TRUE(torch::equal(batch.tokens[i], blend.get(next++).tokens));
  }
  EXPECT_EQ(next, 100U);
  EXPECT_THAT(
      [&] {
        BlendedTokens({a, b}, {1, 3}, 1000000);
      },
      ThrowsMessage<UsageError>(HasSubstr("larger num_samples")));
}

}  // namespace
}  // namespace ds::data
