// Metrics of a run as JSON lines.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

// The metrics of one optimizer step.
struct StepMetrics {
  int64_t step = 0;                 // from 1
  double loss = 0;                  // mean over the global batch, before the step
  std::optional<double> grad_norm;  // null in the file where there is none, or it is not finite (overflow)
  double lr = 0;                    // of the first parameter group, as used by this step
  double loss_scale = 1;            // after the step
  bool skipped = false;
  double step_seconds = 0;
  double tokens_per_second = 0;  // over all ranks
};

// The last line. Lists have one value per rank.
struct RunSummary {
  int world_size = 1;
  int64_t parameters = 0;
  std::vector<int64_t> peak_rss_bytes;
  std::vector<int64_t> model_state_bytes;
  std::vector<int64_t> comm_bytes_sent;  // by the training steps, without start-up
  double median_step_seconds = 0;
};

// Each line is flushed as it is written, so a run can be watched and a killed run leaves whole lines. Not thread safe.
class MetricsFile {
 public:
  // Replaces the file, or appends to it: of a step that is there twice, the later line counts. Throws ds::IoError when
  // it cannot be written.
  explicit MetricsFile(const std::string& path, bool append = false);
  // Throw ds::IoError, for example when the disk is full.
  void write(const StepMetrics& metrics);
  void write(const RunSummary& summary);

 private:
  void write_line(const std::string& line);

  std::string path_;
  std::ofstream out_;
};

}  // namespace gpt
