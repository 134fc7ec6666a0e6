#include "tools/trace_events.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/files/regular_file.h"
#include "core/json/parse_json.h"
#include "core/text.h"

namespace ds::tool {
namespace {

using nlohmann::json;

constexpr size_t kMostBytes = size_t{1} << 30;
constexpr size_t kMostMistakes = 20;
constexpr double kNanosecondsOfMicrosecond = 1e3;
// Times are written in microseconds with three digits, from an origin of some 10^12 of them.
constexpr double kRounding = 0.01;

struct Span {
  double begin = 0;
  double end = 0;
  std::string name;
};

// A text or a number of an event; empty where it has none.
std::string text_of(const json& event, const char* key) {
  const auto found = event.find(key);
  if (found == event.end()) return {};
  return found->is_string() ? found->get<std::string>() : found->dump();
}

int rank_of(const TraceFile& file) {
  const auto info = file.trace.find("distributedInfo");
  const bool has_rank =
      info != file.trace.end() && info->is_object() && info->contains("rank") && info->at("rank").is_number_integer();
  require<ConfigError>(has_rank, file.path,
                       ": expected distributedInfo.rank, which says whose trace it is, found none; ",
                       "profiling::write_traces() and the section \"trace\" write it");
  return info->at("rank").get<int>();
}

int64_t base_of(const TraceFile& file) {
  const auto base = file.trace.find("baseTimeNanoseconds");
  return base != file.trace.end() && base->is_number() ? base->get<int64_t>() : 0;
}

// The processes of one rank under their new numbers.
class Processes {
 public:
  explicit Processes(int rank) : rank_(rank) {}

  int64_t number_of(const std::string& pid) {
    const auto next = static_cast<int64_t>(numbers_.size());
    return numbers_.try_emplace(pid, kOfRank * rank_ + next).first->second;
  }
  void set_label(const std::string& pid, const std::string& label) { labels_[pid] = label; }

  // Events that name them.
  void append_names(json& events) const {
    for (const auto& [pid, number] : numbers_) {
      const auto label = labels_.find(pid);
      const std::string name = cat("rank ", rank_, label == labels_.end() ? "" : cat(" ", label->second));
      events.push_back(
          {{"ph", "M"}, {"name", "process_name"}, {"pid", number}, {"tid", 0}, {"args", {{"name", name}}}});
      events.push_back({{"ph", "M"},
                        {"name", "process_sort_index"},
                        {"pid", number},
                        {"tid", 0},
                        {"args", {{"sort_index", number}}}});
    }
  }

 private:
  static constexpr int64_t kOfRank = 1000;
  int rank_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::string, std::string> labels_;
};

void append_events(const TraceFile& file, int64_t first_base, json& events) {
  const int rank = rank_of(file);
  const double shift = static_cast<double>(base_of(file) - first_base) / kNanosecondsOfMicrosecond;
  Processes processes(rank);
  for (json event : file.trace.at("traceEvents")) {
    const std::string pid = text_of(event, "pid");
    const std::string name = text_of(event, "name");
    if (text_of(event, "ph") == "M" && name.starts_with("process_")) {
      if (name == "process_labels") processes.set_label(pid, text_of(event.value("args", json::object()), "labels"));
      continue;
    }
    event["pid"] = processes.number_of(pid);
    if (event.contains("id")) event["id"] = cat(rank, ':', text_of(event, "id"));
    if (event.contains("ts") && event["ts"].is_number()) event["ts"] = event["ts"].get<double>() + shift;
    events.push_back(std::move(event));
  }
  processes.append_names(events);
}

// Notes a mistake, of which a few are enough.
void note(TraceSummary& summary, std::string mistake) {
  if (summary.mistakes.size() < kMostMistakes) summary.mistakes.push_back(std::move(mistake));
}

// "all_reduce bucket 3 | data | sent 4096 bytes"
void add_bytes(const std::string& name, TraceSummary& summary) {
  constexpr std::string_view kSent = " | sent ";
  const size_t at = name.rfind(kSent);
  if (at == std::string::npos) return;
  int64_t bytes = 0;
  std::from_chars(name.data() + at + kSent.size(), name.data() + name.size(), bytes);
  summary.sent_bytes[name.substr(0, name.find(' '))] += bytes;
}

bool is_step(const Span& span) { return span.name.starts_with("ProfilerStep#"); }

// The share of spans[first] that the spans behind it, in the order of their begins, cover.
double cover_of(const std::vector<Span>& spans, size_t first) {
  const Span& whole = spans[first];
  double covered = 0;
  double until = whole.begin;
  for (size_t i = first + 1; i < spans.size() && spans[i].begin < whole.end; ++i) {
    const double end = std::min(spans[i].end, whole.end);
    covered += std::max(0.0, end - std::max(until, spans[i].begin));
    until = std::max(until, end);
  }
  return whole.end > whole.begin ? covered / (whole.end - whole.begin) : 1;
}

void check_nesting(const std::string& thread, std::vector<Span>& spans, TraceSummary& summary) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  std::vector<const Span*> open;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    while (!open.empty() && open.back()->end <= span.begin + kRounding) open.pop_back();
    if (!open.empty() && span.end > open.back()->end + kRounding) {
      note(summary, cat(thread, ": \"", span.name, "\" begins in \"", open.back()->name, "\" and ends behind it"));
    }
    open.push_back(&span);
    if (!is_step(span)) continue;
    ++summary.steps;
    summary.least_cover = std::min(summary.least_cover, cover_of(spans, i));
  }
}

// The fields that each kind of event has to have, beside "ph".
const std::map<std::string, std::vector<const char*>>& fields_of_kinds() {
  static const std::map<std::string, std::vector<const char*>> kFields = {{"X", {"name", "pid", "tid", "ts", "dur"}},
                                                                          {"i", {"name", "ts"}},
                                                                          {"C", {"name", "pid", "ts", "args"}},
                                                                          {"M", {"name", "pid", "args"}},
                                                                          {"s", {"id", "pid", "ts"}},
                                                                          {"t", {"id", "pid", "ts"}},
                                                                          {"f", {"id", "pid", "ts"}}};
  return kFields;
}

bool has_fields(const json& event, TraceSummary& summary) {
  const std::string kind = text_of(event, "ph");
  const auto fields = fields_of_kinds().find(kind);
  if (fields == fields_of_kinds().end()) {
    note(summary, cat("expected an event with \"ph\" X, i, C, M, s, t or f, found ", event.dump()));
    return false;
  }
  for (const char* field : fields->second) {
    if (!event.contains(field)) {
      note(summary, cat("expected \"", field, "\" in an event of kind ", kind, ", found ", event.dump()));
      return false;
    }
  }
  for (const char* number : {"ts", "dur"}) {
    if (event.contains(number) && (!event[number].is_number() || event[number].get<double>() < 0)) {
      note(summary, cat("expected a number of at least 0 as \"", number, "\", found ", event.dump()));
      return false;
    }
  }
  return true;
}

}  // namespace

TraceFile read_trace_file(const std::string& path) {
  const FileText content = read_regular_file(path, kMostBytes);
  require<IoError>(content.trouble.empty(), path, ": ", content.trouble);
  TraceFile file{.path = path, .trace = {}};
  try {
    file.trace = parse_json<json>(content.text);
  } catch (const json::exception& error) {
    throw ConfigError(cat(path, ": expected JSON, found: ", error.what()));
  }
  const bool has_events =
      file.trace.is_object() && file.trace.contains("traceEvents") && file.trace["traceEvents"].is_array();
  require<ConfigError>(has_events, path, ": expected an object with a list \"traceEvents\", found none");
  for (const json& event : file.trace["traceEvents"]) {
    require<ConfigError>(event.is_object(), path, ": expected objects in \"traceEvents\", found ", event.dump());
  }
  return file;
}

json merge_traces(const std::vector<TraceFile>& files) {
  require<ConfigError>(!files.empty(), "expected traces, found none");
  std::map<int, std::string> paths;
  int64_t first_base = base_of(files.front());
  for (const TraceFile& file : files) {
    const auto [other, is_new] = paths.try_emplace(rank_of(file), file.path);
    require<ConfigError>(is_new, file.path, ": expected one trace for each rank, found another of rank ", other->first,
                         ", ", other->second);
    first_base = std::min(first_base, base_of(file));
  }
  json events = json::array();
  for (const TraceFile& file : files) append_events(file, first_base, events);
  return {{"displayTimeUnit", "ms"}, {"baseTimeNanoseconds", first_base}, {"traceEvents", std::move(events)}};
}

TraceSummary check_trace(const json& trace) {
  TraceSummary summary;
  std::map<std::string, std::vector<Span>> threads;
  for (const json& event : trace.at("traceEvents")) {
    if (!has_fields(event, summary) || text_of(event, "ph") != "X") continue;
    ++summary.spans;
    // Only what the host runs nests: kernels of a stream stand behind one another.
    const std::string category = text_of(event, "cat");
    if (category != "cpu_op" && category != "user_annotation") continue;
    const std::string name = text_of(event, "name");
    add_bytes(name, summary);
    const double begin = event["ts"].get<double>();
    threads[cat("process ", text_of(event, "pid"), ", thread ", text_of(event, "tid"))].push_back(
        {.begin = begin, .end = begin + event["dur"].get<double>(), .name = name});
  }
  for (auto& [thread, spans] : threads) check_nesting(thread, spans, summary);
  return summary;
}

}  // namespace ds::tool
