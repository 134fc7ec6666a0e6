// `ds-tool schedule`: draws and checks a pipeline schedule, without starting anything. Torch-free.
#pragma once

#include <optional>
#include <ostream>
#include <string>

namespace ds::tool {

struct ScheduleOptions {
  // Either a kind and its numbers ...
  std::optional<std::string> kind;   // as parse_schedule_kind() reads it
  std::optional<int> stages;         // ranks of the pipeline
  std::optional<int> micro_batches;  // of a batch
  std::optional<int> chunks;         // stages a rank; by default 2 for kinds that have several, else 1
  // ... or a file in the CSV form of torch.distributed.pipelining.
  std::string file;

  std::string times;     // "F,I,W" of a stage and a micro-batch; empty: as `measured` has them, else 1,1,1
  double message = 0;    // time from one rank to another
  std::string measured;  // a trace of a run, or a folder of them; empty: none
  std::string csv;       // file to write; empty: none
  std::string svg;
  bool list = false;  // print each rank's actions
  bool json = false;  // print one JSON object
  int width = 120;    // columns of the terminal
  bool color = false;
};

// Writes the timetable, or the JSON object, to `out` and mistakes to `err`. Returns the exit code: 0 when the schedule
// is sound and all was written, 2 when not.
int schedule(const ScheduleOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool
