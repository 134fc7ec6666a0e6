#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "core/text.h"
#include "profiling/monitor.h"

namespace ds::profiling {
namespace {

constexpr const char* kCsvSection = "csv_monitor";

std::string file_name(std::string event) {
  std::replace(event.begin(), event.end(), '/', '_');
  std::replace(event.begin(), event.end(), ' ', '_');
  return event + ".csv";
}

class CsvMonitor final : public Monitor {
 public:
  CsvMonitor(const std::string& output_path, const std::string& job_name)
      : folder_(make_monitor_folder(output_path, job_name, kCsvSection)) {}

  void write_events(const std::vector<Event>& events) override {
    for (const Event& event : events) {
      File& file = file_of(event.name);
      file.stream << event.step << ',' << shortest_text(event.value) << '\n';
      if (!file.stream.flush()) fail_to_write(kCsvSection, file.path);
    }
  }

 private:
  struct File {
    std::string path;
    std::ofstream stream;
  };

  File& file_of(const std::string& event) {
    const auto found = files_.find(event);
    if (found != files_.end()) return found->second;
    File file{.path = (std::filesystem::path(folder_) / file_name(event)).string(),
              .stream = classic_stream<std::ofstream>()};
    file.stream.open(file.path, std::ios::app);
    if (!file.stream) fail_to_write(kCsvSection, file.path);
    // An appending stream stands at the end only after its first write.
    file.stream.seekp(0, std::ios::end);
    if (file.stream.tellp() == 0) file.stream << "step," << event.substr(event.rfind('/') + 1) << '\n';
    return files_.emplace(event, std::move(file)).first->second;
  }

  std::string folder_;
  std::map<std::string, File> files_;
};

}  // namespace

std::unique_ptr<Monitor> make_csv_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<CsvMonitor>(output_path, job_name);
}

}  // namespace ds::profiling
