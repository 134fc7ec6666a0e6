#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "core/text.h"
#include "profiling/event_record.h"
#include "profiling/monitor.h"
#include "profiling/monitor_folder.h"

namespace ds::profiling {
namespace {

constexpr const char* kTensorboardSection = "tensorboard";

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// events.out.tfevents.SECONDS.HOST.PID.N: TensorBoard recognises the file by the middle of its name.
std::string file_name() {
  static std::atomic<int> files_of_process = 0;
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  return cat("events.out.tfevents.", static_cast<int64_t>(wall_seconds()), '.', host, '.', ::getpid(), '.',
             files_of_process++);
}

class TensorBoardMonitor final : public Monitor {
 public:
  TensorBoardMonitor(const std::string& output_path, const std::string& job_name)
      : path_((std::filesystem::path(make_monitor_folder(output_path, job_name, kTensorboardSection)) / file_name())
                  .string()),
        file_(path_, std::ios::binary) {
    append(encode_file_version(wall_seconds()));
    flush();
  }

  void write_events(const std::vector<Event>& events) override {
    for (const Event& event : events) {
      append(encode_scalar(wall_seconds(), event.step, event.name, static_cast<float>(event.value)));
    }
    flush();
  }

 private:
  void append(const std::string& event) {
    const std::string record = frame_record(event);
    file_.write(record.data(), static_cast<std::streamsize>(record.size()));
  }
  void flush() {
    if (!file_.flush()) fail_to_write(kTensorboardSection, path_);
  }

  std::string path_;
  std::ofstream file_;
};

}  // namespace

std::unique_ptr<Monitor> make_tensorboard_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<TensorBoardMonitor>(output_path, job_name);
}

}  // namespace ds::profiling
