// ds-tool analyze: its files are those that a curriculum of samples reads.
#include "tools/analyze_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "data/sample_metrics.h"
#include "tests/support/file_text.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"
#include "tests/tools/command_outcome.h"

namespace ds::tool {
namespace {

using efficiency::IndexedDataset;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Outcome run(const AnalyzeOptions& options) {
  return outcome_of([&](auto& out, auto& err) { return analyze(options, out, err); });
}

std::vector<int64_t> elements_of(const std::string& path) {
  const IndexedDataset dataset(path);
  std::vector<int64_t> result;
  for (int64_t i = 0; i < dataset.elements(); ++i) result.push_back(dataset.element(i));
  return result;
}

TEST(AnalyzeCommand, RarityIsTheSumOfNegativeLogarithms) {
  const test::ScratchFolder folder;
  const std::string text = "aaaaaaaabcaaaabbzaaac";  // 21 bytes: 5 sequences of 4, each with the one that follows
  const Outcome outcome = run({.tokens = folder.write("t", text), .seq_len = 4, .output = folder / "out"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("vocab_rarity: 5 samples; values at percentiles 0: "));
  std::map<char, double> count;
  for (const char c : text) count[c] += 1;
  std::vector<int64_t> expected;
  for (size_t begin = 0; begin < 20; begin += 4) {
    double sum = 0;
    for (size_t i = begin; i < begin + 4; ++i) sum += -std::log(count[text[i]] / 21);
    expected.push_back(static_cast<int64_t>(sum));
  }
  const std::string start = folder / "out/vocab_rarity/vocab_rarity";
  EXPECT_EQ(elements_of(start + "_sample_to_metric"), expected);
  efficiency::SampleMetric metric{.name = "vocab_rarity",
                                  .index_to_sample_path = start + "_index_to_sample",
                                  .index_to_metric_path = start + "_index_to_metric"};
  const efficiency::MetricFiles files(metric, 5);
  EXPECT_EQ(files.size(), 5);
  for (const int64_t difficulty : expected) {
    for (int64_t place = 0; place < 5; ++place) {
      const int64_t value = expected[static_cast<size_t>(files.sample(place))];
      EXPECT_EQ(value <= difficulty, place < files.admitted(difficulty));
    }
  }
}

TEST(AnalyzeCommand, SamplesBetweenSeparators) {
  const test::ScratchFolder folder;
  const Outcome outcome = run({.tokens = folder.write("t", "ab\n\nabcd\na\nabcd"),
                               .separator = '\n',
                               .metrics = {"seqlen"},
                               .output = folder / "out"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string start = folder / "out/seqlen/seqlen";
  EXPECT_THAT(elements_of(start + "_sample_to_metric"), ElementsAre(2, 4, 1, 4));
  EXPECT_THAT(elements_of(start + "_index_to_sample"), ElementsAre(2, 0, 1, 3));
  EXPECT_THAT(elements_of(start + "_index_to_metric"), ElementsAre(1, 2, 4));
}

TEST(AnalyzeCommand, TokensOfSeveralBytes) {
  const test::ScratchFolder folder;
  std::string tokens;
  for (const uint16_t token : {700, 1, 700, 2, 3, 700}) test::append(tokens, token);
  ASSERT_EQ(run({.tokens = folder.write("t", tokens),
                 .token_bytes = 2,
                 .separator = 700,
                 .metrics = {"seqlen", "vocab_rarity"},
                 .output = folder / "out"})
                .code,
            0);
  EXPECT_THAT(elements_of(folder / "out/seqlen/seqlen_sample_to_metric"), ElementsAre(1, 2));
  EXPECT_THAT(elements_of(folder / "out/vocab_rarity/vocab_rarity_sample_to_metric"), ElementsAre(1, 3));
}

// The bytes are those of the format as the tests state it, in the smallest type.
TEST(AnalyzeCommand, FilesAreByteForByteTheFormat) {
  const test::ScratchFolder folder;
  const auto same = [&](const std::string& own, const std::string& stated) {
    EXPECT_EQ(test::file_text(own + ".idx"), test::file_text(stated + ".idx"));
    EXPECT_EQ(test::file_text(own + ".bin"), test::file_text(stated + ".bin"));
  };
  efficiency::write_metric(folder.path().string(), "m", {300, -5, 300, 7});
  same(folder / "m/m_index_to_sample", test::write_indexed_dataset<uint8_t>(folder / "a", {{1}, {3}, {0, 2}}));
  same(folder / "m/m_index_to_metric", test::write_indexed_dataset<int16_t>(folder / "b", {{-5}, {7}, {300}}));
  same(folder / "m/m_sample_to_metric", test::write_indexed_dataset<int16_t>(folder / "c", {{300}, {-5}, {300}, {7}}));
  efficiency::write_metric(folder.path().string(), "u", {300, 5});
  same(folder / "u/u_index_to_metric", test::write_indexed_dataset<uint16_t>(folder / "d", {{5}, {300}}));
}

TEST(AnalyzeCommand, MistakesAreNamed) {
  const test::ScratchFolder folder;
  const std::string text = folder.write("t", "abc");
  const auto refusal = [&](const AnalyzeOptions& options) {
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(refusal({.tokens = text, .output = folder / "o"}), HasSubstr("expected --seq_len"));
  EXPECT_THAT(refusal({.tokens = text, .seq_len = 2, .separator = 3, .output = folder / "o"}), HasSubstr("--seq_len"));
  EXPECT_THAT(refusal({.tokens = text, .seq_len = 3, .output = folder / "o"}),
              HasSubstr("at least 3 tokens and one that follows, found 3"));
  EXPECT_THAT(refusal({.tokens = text, .token_bytes = 2, .seq_len = 1, .output = folder / "o"}),
              HasSubstr("tokens of 2 bytes, found 3 bytes"));
  EXPECT_THAT(refusal({.tokens = folder / "none", .seq_len = 1, .output = folder / "o"}),
              HasSubstr("none: cannot open"));
  EXPECT_THAT(refusal({.tokens = folder.write("s", "\n\n"), .separator = '\n', .output = folder / "o"}),
              HasSubstr("expected tokens between"));
  EXPECT_THAT(refusal({.tokens = text, .seq_len = 1, .output = text}),
              AllOf(HasSubstr(text), HasSubstr("cannot be made")));
}

}  // namespace
}  // namespace ds::tool
