#include "profiling/comms_record.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

namespace ds::profiling {
namespace {

using comm::CollectiveKind;

constexpr float kUnknown = -1;
constexpr double kBitsOfByte = 8;
constexpr double kGiga = 1e9;

// The times of the latest that have ended.
std::vector<float> known(const std::vector<float>& latest) {
  std::vector<float> times;
  std::copy_if(latest.begin(), latest.end(), std::back_inserter(times), [](float time) { return time >= 0; });
  return times;
}

}  // namespace

int64_t CommsRecord::launch() {
  const int64_t number = launched++;
  const size_t place = static_cast<size_t>(number) % kKept;
  if (place == latest.size()) {
    latest.push_back(kUnknown);
  } else {
    latest[place] = kUnknown;
  }
  return number;
}

void CommsRecord::end(int64_t number, double duration, int64_t moved) {
  ++count;
  seconds += duration;
  total_bytes += static_cast<double>(moved);
  if (launched - number <= static_cast<int64_t>(kKept)) {
    latest[static_cast<size_t>(number) % kKept] = static_cast<float>(duration);
  }
}

double CommsRecord::average_seconds() const {
  std::vector<float> times = known(latest);
  if (times.empty()) return 0;
  constexpr size_t kTenth = 10;
  std::sort(times.begin(), times.end());
  const size_t cut = times.size() / kTenth;
  double sum = 0;
  for (size_t i = cut; i < times.size() - cut; ++i) sum += static_cast<double>(times[i]);
  return sum / static_cast<double>(times.size() - 2 * cut);
}

Bandwidth bandwidth_of(CollectiveKind kind, double bytes, size_t ranks, double seconds) {
  if (seconds <= 0) return {};
  const double plain = bytes * kBitsOfByte / kGiga / seconds;
  const auto n = static_cast<double>(ranks);
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return {.algorithm = 2 * plain, .bus = plain * 2 * (n - 1) / n};
    case CollectiveKind::kAllGather:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
      return {.algorithm = plain, .bus = plain * (n - 1) / n};
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
  }
  return {.algorithm = plain, .bus = plain};
}

Bandwidth bandwidth_of(const CommsRecord& record) {
  if (record.count == 0) return {};
  const double bytes = record.total_bytes / static_cast<double>(record.count);
  return bandwidth_of(record.kind, bytes, record.ranks.size(), record.average_seconds());
}

std::string to_bytes(const std::vector<CommsRecord>& records) {
  nlohmann::json all = nlohmann::json::array();
  for (const CommsRecord& record : records) {
    all.push_back({record.operation, static_cast<int>(record.kind), record.group, record.ranks, record.bytes,
                   record.launched, record.count, record.latest});
  }
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(all);
  return {bytes.begin(), bytes.end()};
}

std::vector<CommsRecord> records_from_bytes(const std::string& bytes) {
  std::vector<CommsRecord> records;
  for (const nlohmann::json& one : nlohmann::json::from_cbor(bytes)) {
    CommsRecord record;
    record.operation = one.at(0).get<std::string>();
    record.kind = static_cast<CollectiveKind>(one.at(1).get<int>());
    record.group = one.at(2).get<std::string>();
    record.ranks = one.at(3).get<std::vector<int>>();
    record.bytes = one.at(4).get<int64_t>();
    record.launched = one.at(5).get<int64_t>();
    record.count = one.at(6).get<int64_t>();
    record.latest = one.at(7).get<std::vector<float>>();
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace ds::profiling
