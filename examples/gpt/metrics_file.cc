#include "metrics_file.h"

#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>

#include "check.h"

namespace gpt {

using nlohmann::ordered_json;

MetricsFile::MetricsFile(const std::string& path, bool append)
    : path_(path), out_(path, append ? std::ios::app : std::ios::trunc) {
  require<ds::IoError>(out_.is_open(), path, ": cannot write metrics: ", std::generic_category().message(errno),
                       "; check --metrics");
}

void MetricsFile::write(const StepMetrics& metrics) {
  ordered_json line = {{"step", metrics.step}, {"loss", metrics.loss}};
  line["grad_norm"] = metrics.grad_norm ? ordered_json(*metrics.grad_norm) : ordered_json(nullptr);
  line["lr"] = metrics.lr;
  line["loss_scale"] = metrics.loss_scale;
  line["skipped"] = metrics.skipped;
  line["step_seconds"] = metrics.step_seconds;
  line["tokens_per_second"] = metrics.tokens_per_second;
  write_line(line.dump());
}

void MetricsFile::write(const RunSummary& summary) {
  const ordered_json line = {{"summary",
                              {{"world_size", summary.world_size},
                               {"parameters", summary.parameters},
                               {"peak_rss_bytes", summary.peak_rss_bytes},
                               {"model_state_bytes", summary.model_state_bytes},
                               {"comm_bytes_sent", summary.comm_bytes_sent},
                               {"median_step_seconds", summary.median_step_seconds}}}};
  write_line(line.dump());
}

void MetricsFile::write_line(const std::string& line) {
  out_ << line << '\n' << std::flush;
  require<ds::IoError>(out_.good(), path_, ": cannot write metrics: ", std::generic_category().message(errno),
                       "; is the disk full?");
}

}  // namespace gpt
