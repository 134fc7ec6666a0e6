// Files in the trace-event format, as LibTorch's profiler writes them: joined over ranks, and checked. Torch-free.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ds::tool {

// One file, and its name for messages.
struct TraceFile {
  std::string path;
  nlohmann::json trace;
};

// Reads a file. Throws IoError where it cannot be read, ConfigError where it is no trace: an object with traceEvents.
TraceFile read_trace_file(const std::string& path);

// Joins the traces of several ranks, which say in distributedInfo which rank they are, on one clock: that of
// baseTimeNanoseconds, the time of day of each host. Every rank gets processes of its own, named "rank R ...", and its
// flows ids of their own. Throws ConfigError for a file without a rank, and two of one rank.
nlohmann::json merge_traces(const std::vector<TraceFile>& files);

// What a trace has.
struct TraceSummary {
  int64_t spans = 0;
  // What breaks the format, or the nesting of spans of one thread; empty: the trace is sound.
  std::vector<std::string> mistakes;
  std::map<std::string, int64_t> sent_bytes;  // by kind of collective, as the spans of collectives say
  int64_t steps = 0;                          // spans "ProfilerStep#N"
  double least_cover = 1;                     // of all steps, the least share that spans inside of it cover
};

// Looks at every event: its kind, the fields that this kind has, and whether spans of a thread nest.
TraceSummary check_trace(const nlohmann::json& trace);

}  // namespace ds::tool
