#include "profiling/comms_table.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>

#include "core/text.h"

namespace ds::profiling {
namespace {

using comm::CollectiveKind;

constexpr double kMilliseconds = 1e3;
constexpr size_t kWidth = 20;
constexpr size_t kMostRanks = 8;  // ranks of a line: those that waited longest

constexpr size_t kColumns = 8;
using Line = std::array<std::string, kColumns>;

// Columns as wide as their widest cell, DeepSpeed's width at least.
std::string text_of(const std::vector<Line>& lines) {
  std::array<size_t, kColumns> widths;
  widths.fill(kWidth);
  for (const Line& line : lines) {
    for (size_t i = 0; i < kColumns; ++i) widths[i] = std::max(widths[i], line[i].size() + 2);
  }
  std::string text;
  for (const Line& line : lines) {
    text += '\n';
    for (size_t i = 0; i + 1 < kColumns; ++i) text += line[i] + std::string(widths[i] - line[i].size(), ' ');
    text += line.back();
  }
  return text;
}

std::string milliseconds(double seconds) { return fixed(seconds * kMilliseconds, 2); }

std::string group_text(const std::string& name, const std::vector<int>& ranks) {
  return cat(name, " (", ranks.size(), ")");
}

using Key = std::tuple<std::string, std::string, std::vector<int>, int64_t>;  // operation, group, ranks, bytes

Key key_of(const CommsRecord& record) { return {record.operation, record.group, record.ranks, record.bytes}; }

bool is_compared(const CommsRecord& record) {
  return record.kind != CollectiveKind::kSend && record.kind != CollectiveKind::kRecv && record.bytes != kOtherSizes;
}

// "0: 0.00 | 1: 2.50"
std::string waited_text(const Straggling& one) {
  std::vector<size_t> places(one.ranks.size());
  std::iota(places.begin(), places.end(), size_t{0});
  const bool all = places.size() <= kMostRanks;
  if (!all) {
    std::partial_sort(places.begin(), places.begin() + kMostRanks, places.end(),
                      [&](size_t a, size_t b) { return one.waited_seconds[a] > one.waited_seconds[b]; });
    places.resize(kMostRanks);
  }
  std::string text;
  for (const size_t place : places) {
    text += cat(text.empty() ? "" : " | ", one.ranks[place], ": ", milliseconds(one.waited_seconds[place]));
  }
  return all ? text : text + " | others less";
}

// `records`: of each rank of the group.
Straggling compare(const std::vector<const CommsRecord*>& records) {
  const CommsRecord& first = *records.front();
  Straggling result{.operation = first.operation, .group = first.group, .ranks = first.ranks, .bytes = first.bytes};
  result.waited_seconds.resize(records.size());
  for (size_t place = 0; place < first.latest.size(); ++place) {
    float shortest = first.latest[place];
    for (const CommsRecord* record : records) shortest = std::min(shortest, record->latest[place]);
    if (shortest < 0) continue;  // has not ended on one of them
    ++result.count;
    result.communication_seconds += static_cast<double>(shortest);
    for (size_t rank = 0; rank < records.size(); ++rank) {
      result.waited_seconds[rank] += static_cast<double>(records[rank]->latest[place] - shortest);
    }
  }
  return result;
}

}  // namespace

std::vector<Straggling> compare_ranks(const std::vector<std::vector<CommsRecord>>& ranks) {
  std::map<Key, std::vector<const CommsRecord*>> found;
  std::vector<Key> order;
  for (const std::vector<CommsRecord>& records : ranks) {
    for (const CommsRecord& record : records) {
      if (!is_compared(record)) continue;
      auto& of_key = found[key_of(record)];
      if (of_key.empty()) order.push_back(key_of(record));
      of_key.push_back(&record);
    }
  }
  std::vector<Straggling> result;
  for (const Key& key : order) {
    const std::vector<const CommsRecord*>& records = found.at(key);
    const CommsRecord& first = *records.front();
    const bool alike = std::all_of(records.begin(), records.end(),
                                   [&](const CommsRecord* record) { return record->launched == first.launched; });
    if (records.size() != first.ranks.size() || !alike) continue;
    result.push_back(compare(records));
    if (result.back().count == 0) result.pop_back();
  }
  return result;
}

std::string size_text(int64_t bytes) {
  if (bytes == kOtherSizes) return "other sizes";
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  constexpr double kNext = 1024;
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= kNext && unit + 1 < kUnits.size(); ++unit) value /= kNext;
  return cat(fixed(value, unit == 0 ? 0 : 2), " ", kUnits.at(unit));
}

std::string summary_table(const std::vector<CommsRecord>& records) {
  std::vector<Line> lines;
  lines.push_back({"Comm. Op", "Group (ranks)", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)",
                   "tput_avg (Gbps)", "busbw_avg (Gbps)"});
  for (const CommsRecord& record : records) {
    const Bandwidth bandwidth = bandwidth_of(record);
    lines.push_back({record.operation, group_text(record.group, record.ranks), size_text(record.bytes),
                     cat(record.count), milliseconds(record.seconds), milliseconds(record.average_seconds()),
                     fixed(bandwidth.algorithm, 2), fixed(bandwidth.bus, 2)});
  }
  return text_of(lines);
}

std::string straggler_table(const std::vector<Straggling>& compared) {
  std::vector<Line> lines;
  lines.push_back({"Comm. Op", "Group (ranks)", "Message Size", "Count", "Total comm lat(ms)", "Avg comm lat(ms)",
                   "Last to come", "Straggler effect by rank (ms)"});
  for (const Straggling& one : compared) {
    const auto last = std::min_element(one.waited_seconds.begin(), one.waited_seconds.end());
    lines.push_back({one.operation, group_text(one.group, one.ranks), size_text(one.bytes), cat(one.count),
                     milliseconds(one.communication_seconds),
                     milliseconds(one.communication_seconds / static_cast<double>(one.count)),
                     cat("rank ", one.ranks.at(static_cast<size_t>(last - one.waited_seconds.begin()))),
                     waited_text(one)});
  }
  return text_of(lines);
}

}  // namespace ds::profiling
