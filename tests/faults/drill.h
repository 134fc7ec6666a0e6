// Jobs with a rank that does what it should not, under ds-launch.
#pragma once

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/launcher/launched.h"

namespace ds::launcher::testing {

inline constexpr double kLimit = 1;  // seconds
inline constexpr int kEndedByWatch = 124;

struct Outcome {
  int exit_code;
  std::string text;  // all that ds-launch and the ranks wrote
};

// Over shared memory the verdict ends what ranks wait in, and the program ends by its error. Where an operation does
// not end, or a rank takes longer than the watch waits, the watch ends the process.
inline bool ended_by_verdict(const Outcome& outcome) {
  return outcome.exit_code == 1 || outcome.exit_code == kEndedByWatch;
}

// A job of drill_program, the faulty rank with this number: of three ranks, or of four of which so many neighbours have
// parts of the layers, or of four such for each stage of a pipeline.
class Drill {
 public:
  explicit Drill(int tensor = 1, int pipe = 1) : tensor_(tensor), pipe_(pipe) {}
  Launched::Settings settings(const std::string& backend, const std::string& fault, int rank) const {
    return {.flags = {"--num_procs", tensor_ > 1 ? std::to_string(4 * pipe_) : "3", "--failure_grace", "1"},
            .program = {DS_DRILL_PROGRAM, backend, std::to_string(kLimit), fault, std::to_string(rank),
                        std::to_string(tensor_), std::to_string(pipe_)},
            .environment = {"OMP_NUM_THREADS=1", "DS_FLIGHT_FOLDER=" + (folder_ / "flight")}};
  }
  Outcome run(const std::string& backend, const std::string& fault, int rank = 1) const {
    Launched launched(settings(backend, fault, rank));
    const int exit_code = launched.wait();
    return {exit_code, launched.err() + launched.out()};
  }

  // What `ds-tool explain` says of the first stall. A busy machine may make more of them.
  nlohmann::json explained() const {
    std::string first;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "flight")) {
      if (entry.path().filename() == "stall1") first = entry.path();
    }
    FILE* const pipe = popen((std::string(DS_TOOL) + " explain --json " + first).c_str(), "r");
    std::string text;
    for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) text.push_back(static_cast<char>(c));
    return pclose(pipe) == 0 ? nlohmann::json::parse(text) : nlohmann::json();
  }
  bool left_records() const {
    const std::filesystem::path folder = folder_ / "flight";
    return std::filesystem::exists(folder) && !std::filesystem::is_empty(folder);
  }

 private:
  int tensor_;
  int pipe_;
  TemporaryFolder folder_;
};

}  // namespace ds::launcher::testing
