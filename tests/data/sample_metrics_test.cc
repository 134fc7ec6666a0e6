// Files of DeepSpeed's DataAnalyzer, right and wrong ones, and the samples that they admit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "core/check.h"
#include "data/indexed_dataset.h"
#include "data/sample_metrics.h"
#include "tests/support/file_text.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::efficiency {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using testing::UnorderedElementsAre;

std::string refusal_of(const std::function<void()>& action) { return test::thrown_by<IoError>(action, ""); }

template <class T>
void round_trip(const test::ScratchFolder& folder, const std::vector<std::vector<T>>& rows) {
  const IndexedDataset dataset(test::write_indexed_dataset(folder / "rows", rows));
  ASSERT_EQ(dataset.rows(), static_cast<int64_t>(rows.size()));
  int64_t place = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    EXPECT_EQ(dataset.begin_of(static_cast<int64_t>(row)), place);
    for (const T element : rows[row]) EXPECT_EQ(dataset.element(place++), static_cast<int64_t>(element));
  }
  EXPECT_EQ(dataset.begin_of(dataset.rows()), place);
  EXPECT_EQ(dataset.elements(), place);
}

TEST(IndexedDataset, EveryTypeOfInteger) {
  const test::ScratchFolder folder;
  round_trip<uint8_t>(folder, {{1, 255}, {}, {7}});
  round_trip<int8_t>(folder, {{-128, 127}, {3}});
  round_trip<int16_t>(folder, {{-32768, 32767}, {3}});
  round_trip<int32_t>(folder, {{-2147483647 - 1, 2147483647}});
  round_trip<int64_t>(folder, {{INT64_MIN, INT64_MAX}, {0}});
  round_trip<uint16_t>(folder, {{65535}, {1, 2, 3}});
  round_trip<uint32_t>(folder, {{4294967295U}, {1, 2, 3}});
  round_trip<uint64_t>(folder, {{9223372036854775807U}, {1}});
  round_trip<int64_t>(folder, {});
}

// Written by DeepSpeed 0.19.6: MMapIndexedDatasetBuilder(dtype=np.uint8), rows [3, 1] and [2], one document.
TEST(IndexedDataset, BytesOfDeepSpeed) {
  const test::ScratchFolder folder;
  folder.write("a.bin", std::string("\x03\x01\x02", 3));
  folder.write("a.idx", std::string("MMIDIDX\0\0"
                                    "\x01\0\0\0\0\0\0\0"
                                    "\x01"
                                    "\x02\0\0\0\0\0\0\0"
                                    "\x02\0\0\0\0\0\0\0"
                                    "\x02\0\0\0\x01\0\0\0"
                                    "\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
                                    "\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
                                    74));
  const IndexedDataset dataset(folder / "a");
  EXPECT_EQ(dataset.rows(), 2);
  EXPECT_EQ(dataset.element(0), 3);
  EXPECT_EQ(dataset.element(2), 2);
  EXPECT_EQ(dataset.begin_of(1), 2);
}

TEST(IndexedDataset, WhatIsWrongIsNamed) {
  const test::ScratchFolder folder;
  const std::string path = test::write_indexed_dataset<int32_t>(folder / "m", {{5, 6}, {7}});
  const std::string index = test::file_text(path + ".idx");
  const std::string data = test::file_text(path + ".bin");
  const auto with = [&](const std::string& changed_index, const std::string& changed_data) {
    folder.write("m.idx", changed_index);
    folder.write("m.bin", changed_data);
    return refusal_of([&] { const IndexedDataset dataset(path); });
  };
  const auto byte = [&](size_t at, char value) {
    std::string changed = index;
    changed[at] = value;
    return with(changed, data);
  };
  EXPECT_EQ(with(index, data), "");
  EXPECT_THAT(byte(0, 'T'), AllOf(StartsWith(path + ".idx: does not begin with MMIDIDX"), HasSubstr("DataAnalyzer")));
  EXPECT_THAT(byte(9, 2), HasSubstr(".idx: found version 2, expected 1"));
  EXPECT_THAT(byte(17, 0), HasSubstr("dtype code 0, expected 1 to 8"));
  EXPECT_THAT(byte(17, 9), HasSubstr("dtype code 9"));
  EXPECT_THAT(byte(17, 5), HasSubstr("row 1 begins at byte 8 of the .bin, expected 16"));
  EXPECT_THAT(byte(18, 3), HasSubstr("are not those of 3 rows and 2 documents"));
  EXPECT_THAT(byte(25, '\x7f'), HasSubstr("rows and 2 documents")) << "a number of rows beyond all memory";
  EXPECT_THAT(byte(33, '\xff'), HasSubstr("documents"));
  EXPECT_THAT(byte(37, '\xff'), HasSubstr("row 0 has -"));
  EXPECT_THAT(byte(34, 3), HasSubstr("row 1 begins at byte 8 of the .bin, expected 12"));
  EXPECT_THAT(byte(42, 4), HasSubstr("row 0 begins at byte 4 of the .bin, expected 0"));
  EXPECT_THAT(byte(38, 2), HasSubstr(".bin: found 12 bytes, row 1 of the .idx ends at 16"));
  EXPECT_THAT(with(index, data + "x"), HasSubstr(".bin: found 13 bytes, the rows of the .idx are 12"));
  EXPECT_THAT(with(index, ""), HasSubstr(".bin: found 0 bytes, row 0 of the .idx ends at 8"));
  for (size_t length = 0; length < index.size(); ++length) {
    EXPECT_NE(with(index.substr(0, length), data), "") << "cut to " << length;
  }
  EXPECT_THAT(refusal_of([&] { const IndexedDataset dataset(folder / "none"); }), HasSubstr("none.idx: cannot open"));
  const IndexedDataset large(test::write_indexed_dataset<uint64_t>(folder / "u", {{UINT64_MAX}}));
  EXPECT_THAT(refusal_of([&] { large.element(0); }), HasSubstr("u.bin: element 0 is 18446744073709551615"));
}

SampleMetric metric_of(const test::ScratchFolder& folder, const std::vector<int64_t>& values,
                       bool by_percentile = false, const std::string& name = "length") {
  const test::MetricPaths paths = test::write_metric(folder.path().string(), name, values);
  SampleMetric metric{.name = name,
                      .index_to_sample_path = paths.index_to_sample,
                      .index_to_metric_path = paths.index_to_metric,
                      .by_percentile = by_percentile};
  metric.schedule.max_difficulty = by_percentile ? 10 : 100;
  return metric;
}

std::vector<int64_t> first_samples(const MetricFiles& files, int64_t difficulty) {
  std::vector<int64_t> samples;
  for (int64_t place = 0; place < files.admitted(difficulty); ++place) samples.push_back(files.sample(place));
  return samples;
}

TEST(MetricFiles, AdmitsUpToAValue) {
  const test::ScratchFolder folder;
  const MetricFiles files(metric_of(folder, {30, 10, 20, 10, 40}), 5);
  EXPECT_EQ(files.admitted(9), 0);
  EXPECT_THAT(first_samples(files, 10), ElementsAre(1, 3));
  EXPECT_THAT(first_samples(files, 29), ElementsAre(1, 3, 2));
  EXPECT_THAT(first_samples(files, 30), ElementsAre(1, 3, 2, 0));
  EXPECT_EQ(files.admitted(1000), 5);
  EXPECT_EQ(files.least(), "value 10");
}

// sample_per_percentile = N // max_difficulty, and all of them at max_difficulty.
TEST(MetricFiles, AdmitsUpToAPercentile) {
  const test::ScratchFolder folder;
  std::vector<int64_t> values(25);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int64_t>(25 - i);
  SampleMetric metric = metric_of(folder, values, true);
  metric.index_to_metric_path = "not read";
  const MetricFiles files(metric, 25);
  EXPECT_EQ(files.admitted(0), 0);
  EXPECT_THAT(first_samples(files, 1), ElementsAre(24, 23));
  EXPECT_EQ(files.admitted(9), 18);
  EXPECT_EQ(files.admitted(10), 25);
}

TEST(MetricFiles, WhatIsWrongIsNamed) {
  const test::ScratchFolder folder;
  const SampleMetric metric = metric_of(folder, {30, 10, 20});
  const auto refusal = [&](int64_t size) { return refusal_of([&] { const MetricFiles files(metric, size); }); };
  EXPECT_EQ(refusal(3), "");
  EXPECT_EQ(refusal(4), "") << "samples that the metric does not know are never admitted";
  EXPECT_THAT(refusal(2), AllOf(StartsWith("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics."
                                           "length.index_to_sample_path: "),
                                HasSubstr(metric.index_to_sample_path + ".bin: element 1 is sample 2"),
                                HasSubstr("the 2 samples of the training data; was another dataset analysed?")));
  test::write_indexed_dataset<int32_t>(metric.index_to_metric_path, {{10}, {20}});
  EXPECT_THAT(refusal(3), AllOf(HasSubstr("length.index_to_metric_path: "), HasSubstr("a row for each of the 3")));
  test::write_indexed_dataset<int32_t>(metric.index_to_metric_path, {{10}, {20}, {20}});
  EXPECT_THAT(refusal(3), HasSubstr("values that grow from row to row, found 20 in row 2 behind 20"));
  test::write_indexed_dataset<int32_t>(metric.index_to_metric_path, {{10}, {}, {20, 30}});
  EXPECT_THAT(refusal(3), HasSubstr("expected one value in row 1, found 0"));
  test::write_indexed_dataset<int32_t>(metric.index_to_metric_path, {{10}, {20}, {30}});
  test::write_indexed_dataset<int32_t>(metric.index_to_sample_path, {{1}, {2}, {1}});
  EXPECT_THAT(refusal(3), HasSubstr("expected each sample once, found 1 again at element 2"));
  test::write_indexed_dataset<int32_t>(metric.index_to_sample_path, {{1}, {-2}, {0}});
  EXPECT_THAT(refusal(3), HasSubstr("element 1 is sample -2"));
  test::write_indexed_dataset<int32_t>(metric.index_to_metric_path, {});
  test::write_indexed_dataset<int32_t>(metric.index_to_sample_path, {});
  EXPECT_THAT(refusal(3), HasSubstr("expected samples, found none"));
  std::filesystem::remove(metric.index_to_sample_path + ".bin");
  EXPECT_THAT(refusal(3), AllOf(HasSubstr("length.index_to_sample_path: "), HasSubstr(".bin: cannot open")));
}

TEST(MetricFiles, OtherFilesHaveAnotherDigest) {
  const test::ScratchFolder a;
  const test::ScratchFolder b;
  const uint64_t digest = MetricFiles(metric_of(a, {30, 10, 20}), 3).digest();
  EXPECT_EQ(MetricFiles(metric_of(b, {30, 10, 20}), 3).digest(), digest);
  EXPECT_NE(MetricFiles(metric_of(b, {30, 10, 21}), 3).digest(), digest);
  EXPECT_NE(MetricFiles(metric_of(b, {10, 30, 20}), 3).digest(), digest);
}

SampleClusters clusters_of(int64_t size, const std::vector<SampleMetric>& metrics) {
  const auto files = std::make_shared<std::vector<MetricFiles>>();
  for (const SampleMetric& metric : metrics) files->emplace_back(metric, size);
  return {size, files};
}

std::vector<int64_t> samples_of(const SampleClusters& clusters, size_t cluster) {
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < clusters.size(cluster); ++i) samples.push_back(clusters.sample(cluster, i));
  return samples;
}

TEST(SampleClusters, WithoutAMetricAllSamplesAreOne) {
  SampleClusters clusters = clusters_of(4, {});
  EXPECT_TRUE(clusters.grow({}));
  EXPECT_FALSE(clusters.grow({}));
  ASSERT_EQ(clusters.count(), 1U);
  EXPECT_THAT(samples_of(clusters, 0), ElementsAre(0, 1, 2, 3));
}

TEST(SampleClusters, EachGrowthIsACluster) {
  const test::ScratchFolder folder;
  SampleClusters clusters = clusters_of(5, {metric_of(folder, {30, 10, 20, 10, 40})});
  EXPECT_FALSE(clusters.grow({5}));
  EXPECT_TRUE(clusters.grow({10}));
  EXPECT_FALSE(clusters.grow({15}));
  EXPECT_TRUE(clusters.grow({35}));
  ASSERT_EQ(clusters.count(), 2U);
  EXPECT_EQ(clusters.admitted(), 4);
  EXPECT_THAT(samples_of(clusters, 0), UnorderedElementsAre(1, 3));
  EXPECT_THAT(samples_of(clusters, 1), UnorderedElementsAre(0, 2));
}

// Of several metrics: those that all admit, minus earlier clusters, whatever grew first.
TEST(SampleClusters, SamplesThatAllMetricsAdmit) {
  const test::ScratchFolder folder;
  constexpr int64_t kSize = 200;
  std::vector<int64_t> a(kSize);
  std::vector<int64_t> b(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    a[static_cast<size_t>(i)] = i * 37 % 91 + 1;
    b[static_cast<size_t>(i)] = i * 53 % 83 + 1;
  }
  const std::vector<SampleMetric> metrics = {metric_of(folder, a, false, "a"), metric_of(folder, b, false, "b")};
  SampleClusters clusters = clusters_of(kSize, metrics);
  const std::vector<std::vector<int64_t>> steps = {{1, 1}, {20, 30}, {20, 60}, {50, 60}, {50, 100}, {100, 100}};
  std::set<int64_t> earlier;
  std::vector<std::vector<int64_t>> grown;
  for (const auto& step : steps) {
    std::vector<int64_t> expected;
    for (int64_t i = 0; i < kSize; ++i) {
      const bool admitted = a[static_cast<size_t>(i)] <= step[0] && b[static_cast<size_t>(i)] <= step[1];
      if (admitted && earlier.insert(i).second) expected.push_back(i);
    }
    const size_t before = clusters.count();
    ASSERT_EQ(clusters.grow(step), !expected.empty());
    if (expected.empty()) continue;
    grown.push_back(step);
    EXPECT_EQ(samples_of(clusters, before), expected);
  }
  EXPECT_EQ(clusters.admitted(), kSize);
  SampleClusters again = clusters_of(kSize, metrics);
  for (const auto& step : grown) again.grow(step);
  for (size_t c = 0; c < clusters.count(); ++c) EXPECT_EQ(samples_of(again, c), samples_of(clusters, c));
}

}  // namespace
}  // namespace ds::efficiency
