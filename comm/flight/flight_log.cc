#include "comm/flight/flight_log.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <type_traits>

#include "comm/flight/rank_list.h"
#include "core/check.h"
#include "core/json/parse_json.h"
#include "core/system_call.h"
#include "core/text.h"

namespace ds::comm {
namespace {

static_assert(std::is_trivially_copyable_v<FlightHeader> && std::is_trivially_copyable_v<FlightGroup> &&
              std::is_trivially_copyable_v<FlightEntry>);

constexpr std::array<char, 8> kMemory = {'D', 'S', 'F', 'L', 'I', 'G', 'H', 'T'};
constexpr std::array<char, 8> kPacked = {'D', 'S', 'F', 'L', 'P', 'A', 'C', 'K'};
constexpr uint32_t kVersion = 3;

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Differences of two times of a clock fit 64 bits, whatever a file says.
bool is_time(int64_t nanoseconds) { return nanoseconds >= 0 && nanoseconds < int64_t{1} << 62; }

// Reads values one after another.
class ByteReader {
 public:
  ByteReader(const char* at, size_t size, const std::string& source) : at_(at), left_(size), source_(source) {}

  template <class T>
  T next() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  // Adds the next entry, but for one that no recorder writes: another state or bool, or times that are none.
  void next_entry(std::vector<FlightEntry>& entries) {
    const char* const bytes = take(sizeof(FlightEntry));
    const auto byte_at = [bytes](size_t offset) { return static_cast<uint8_t>(bytes[offset]); };
    if (byte_at(offsetof(FlightEntry, state)) > static_cast<uint8_t>(FlightState::kFailed)) return;
    if (byte_at(offsetof(FlightEntry, message)) > 1) return;
    FlightEntry entry;
    std::memcpy(&entry, bytes, sizeof entry);
    if (is_time(entry.issued_ns) && is_time(entry.waited_ns) && is_time(entry.ended_ns)) entries.push_back(entry);
  }
  std::string rest() const { return {at_, left_}; }

 private:
  const char* take(size_t size) {
    require<ConfigError>(left_ >= size, source_, ": expected a flight log, found one that ends early");
    const char* const bytes = at_;
    at_ += size;
    left_ -= size;
    return bytes;
  }

  const char* at_;
  size_t left_;
  const std::string& source_;
};

FlightHeader read_header(ByteReader& reader, const std::array<char, 8>& magic, const std::string& source) {
  const auto header = reader.next<FlightHeader>();
  require<ConfigError>(header.magic == magic, source, ": expected a flight log, found another file");
  require<ConfigError>(header.version == kVersion, source, ": expected a flight log of version ", kVersion,
                       ", found version ", header.version, "; read it with the ds-tool of the program that wrote it");
  require<ConfigError>(header.groups <= kFlightGroups && header.entries <= kMostFlightEntries && header.rank >= 0 &&
                           is_time(header.now_ns) && is_time(header.phase_ns),
                       source, ": expected a flight log, found a damaged one");
  return header;
}

// Drops entries that were being written while they were copied: their neighbours in the ring are newer or older.
void keep_whole_entries(FlightLog& log) {
  const uint64_t next = log.header.next_sequence;
  std::erase_if(log.entries, [&](const FlightEntry& entry) {
    return entry.sequence == 0 || entry.sequence >= next || entry.sequence + log.header.entries < next ||
           entry.group >= log.groups.size();
  });
  std::sort(log.entries.begin(), log.entries.end(),
            [](const FlightEntry& a, const FlightEntry& b) { return a.sequence < b.sequence; });
  for (const FlightEntry& entry : log.entries) {  // newer than the last heartbeat
    log.header.now_ns = std::max({log.header.now_ns, entry.issued_ns, entry.waited_ns, entry.ended_ns});
  }
}

std::string packed(const FlightLog& log, const std::vector<FlightEntry>& entries) {
  std::string bytes;
  FlightHeader header = log.header;
  header.magic = kPacked;
  header.version = kVersion;
  header.groups = static_cast<uint32_t>(log.groups.size());
  append(bytes, header);
  append(bytes, static_cast<uint32_t>(entries.size()));
  for (const FlightGroup& group : log.groups) append(bytes, group);
  for (const FlightEntry& entry : entries) append(bytes, entry);
  nlohmann::json found = nlohmann::json::object();
  found["stack"] = log.stack;
  found["silent_seconds"] = log.silent_seconds;
  found["dead_after_seconds"] = log.dead_after_seconds;
  for (const auto& [rank, state] : log.neighbours) found["neighbours"][std::to_string(rank)] = std::string(1, state);
  return bytes + found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

FlightLog unpacked(ByteReader& reader, const std::string& source) {
  FlightLog log;
  log.header = read_header(reader, kPacked, source);
  const auto entries = reader.next<uint32_t>();
  for (uint32_t g = 0; g < log.header.groups; ++g) log.groups.push_back(reader.next<FlightGroup>());
  for (uint32_t e = 0; e < entries; ++e) reader.next_entry(log.entries);
  keep_whole_entries(log);
  try {
    const auto found = parse_json<nlohmann::json>(reader.rest());
    for (const auto& frame : found.at("stack")) log.stack.push_back(frame);
    log.silent_seconds = found.at("silent_seconds");
    log.dead_after_seconds = found.at("dead_after_seconds");
    if (!found.contains("neighbours")) return log;
    for (const auto& [rank, state] : found["neighbours"].items()) {
      log.neighbours[std::stoi(rank)] = state.get<std::string>().at(0);
    }
  } catch (const std::exception& error) {
    throw ConfigError(cat(source, ": expected a flight log, found one with a damaged end: ", error.what()));
  }
  return log;
}

// Adds the newest message of each direction, peer and tag of a group; of very many the newest ones.
void add_last_messages(const FlightLog& log, std::set<const FlightEntry*>& shown) {
  constexpr size_t kMostMessages = 32;
  std::set<std::tuple<uint16_t, std::string, int32_t, int32_t>> seen;
  for (auto entry = log.entries.rbegin(); entry != log.entries.rend() && seen.size() < kMostMessages; ++entry) {
    if (!entry->message) continue;
    const bool is_new = seen.emplace(entry->group, entry->operation.text(), entry->peer, entry->tag).second;
    if (is_new) shown.insert(&*entry);
  }
}

}  // namespace

const char* name_of(FlightState state) {
  static constexpr const char* kNames[] = {"issued", "waiting", "finished", "released", "failed"};
  return kNames[static_cast<size_t>(state)];
}

const FlightEntry* FlightLog::waiting() const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [](const FlightEntry& entry) { return entry.state == FlightState::kWaiting; });
  return found == entries.end() ? nullptr : &*found;
}

const FlightEntry* FlightLog::last() const { return entries.empty() ? nullptr : &entries.back(); }

size_t flight_bytes(uint32_t entries) {
  return sizeof(FlightHeader) + kFlightGroups * sizeof(FlightGroup) + entries * sizeof(FlightEntry);
}

std::string to_bytes(const FlightLog& log) { return packed(log, log.entries); }

std::string to_board(const FlightLog& log) {
  const FlightEntry* const waiting = log.waiting();
  std::set<const FlightEntry*> shown{waiting, log.last()};  // by address, which is the order of issue
  if (waiting != nullptr) add_last_messages(log, shown);
  std::vector<FlightEntry> entries;
  for (const FlightEntry* const entry : shown) {
    if (entry != nullptr) entries.push_back(*entry);
  }
  return packed(log, entries);
}

FlightLog log_from_memory(const void* memory, size_t size, const std::string& source) {
  const std::string copy(static_cast<const char*>(memory), size);
  ByteReader reader(copy.data(), copy.size(), source);
  FlightLog log;
  log.header = read_header(reader, kMemory, source);
  for (uint32_t g = 0; g < kFlightGroups; ++g) {
    const auto group = reader.next<FlightGroup>();
    if (g < log.header.groups) log.groups.push_back(group);
  }
  for (uint32_t e = 0; e < log.header.entries; ++e) reader.next_entry(log.entries);
  keep_whole_entries(log);
  return log;
}

FlightLog log_from_bytes(const std::string& bytes, const std::string& source) {
  if (bytes.size() >= kMemory.size() && std::equal(kMemory.begin(), kMemory.end(), bytes.begin())) {
    return log_from_memory(bytes.data(), bytes.size(), source);
  }
  ByteReader reader(bytes.data(), bytes.size(), source);
  return unpacked(reader, source);
}

FlightLog read_flight_file(const std::string& path) {
  auto file = classic_stream<std::ifstream>(path, std::ios::binary);
  require_system<IoError>(file.is_open(), path, ": cannot be read");
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  return log_from_bytes(bytes, path);
}

std::string operation_text(const FlightEntry& entry, const FlightGroup& group) {
  std::string text = entry.operation.text();
  if (entry.label.size() > 0) text += cat(" '", entry.label.text(), "'");
  const std::string end = cat(")", of_phase(entry.phase.text()));
  text += " (";
  if (entry.elements > 0) text += cat(entry.dtype.text(), "[", entry.elements, "], ");
  if (entry.reduction.size() > 0) text += cat(entry.reduction.text(), ", ");
  if (entry.message) {
    return text + cat(entry.operation.text() == "send" ? "to" : "from", " rank ", entry.peer, ", message ",
                      entry.position, entry.tag != 0 ? cat(", tag ", entry.tag) : "", " of group ", group.name.text(),
                      end);
  }
  if (entry.peer >= 0) text += cat("root ", entry.peer, ", ");
  return text + cat("number ", entry.position, " of group ", group.name.text(),
                    entry.step > 0 ? cat(", step ", entry.step) : "", end);
}

void set_magic(FlightHeader& header) {
  header.magic = kMemory;
  header.version = kVersion;
}

}  // namespace ds::comm
