#include "comm/flight/flight_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <vector>

#include "comm/flight/flight_memory.h"
#include "comm/meeting/environment_reader.h"
#include "core/flight_job.h"
#include "core/log.h"

namespace ds::comm {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::hours kKept{24 * 7};
constexpr const char* kRank = "rank";
constexpr const char* kEnding = ".flight";
constexpr const char* kStall = "stall";
constexpr const char* kSummary = "summary.txt";

// The entries of a folder; none where it cannot be read.
std::vector<fs::directory_entry> entries_of(const fs::path& folder) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) entries.push_back(*at);
  return entries;
}

bool is_record(const fs::path& file) {
  const std::string name = file.filename();
  return name == kSummary || (name.starts_with(kRank) && name.ends_with(kEnding));
}

// All files of a job's folder, when it holds nothing but records, of which none is young or in use; else empty.
std::vector<fs::path> old_records(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : entries_of(folder)) {
    std::error_code error;
    if (entry.is_directory(error) && entry.path().filename().string().starts_with(kStall)) {
      const std::vector<fs::path> inner = old_records(entry.path());
      if (inner.empty()) return {};
      files.insert(files.end(), inner.begin(), inner.end());
      files.push_back(entry.path());
      continue;
    }
    const auto written = entry.last_write_time(error);
    const bool old = !error && fs::file_time_type::clock::now() - written > kKept;
    if (!old || !entry.is_regular_file(error) || !is_record(entry.path())) return {};
    if (FlightMemory::is_in_use(entry.path())) return {};  // written through a mapping, it may look old
    files.push_back(entry.path());
  }
  return files;
}

// Removes nothing that is not ours: the base may be a folder with other things in it.
void remove_old(const fs::path& base) {
  for (const fs::directory_entry& job : entries_of(base)) {
    std::error_code error;
    if (!job.is_directory(error) || job.is_symlink(error)) continue;
    const std::vector<fs::path> files = old_records(job.path());
    for (const fs::path& file : files) fs::remove(file, error);
    if (!files.empty()) fs::remove(job.path(), error);
  }
}

// Makes it for this user alone, and what it lies in. Where everybody may write, somebody else may have made it, or put
// a link in its place, which is looked at when nobody can do so any more. Returns why not; empty: it is there.
std::string make_own_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  struct stat status {};
  if (!error && lstat(folder.c_str(), &status) != 0) error.assign(errno, std::generic_category());
  if (!error && (!S_ISDIR(status.st_mode) || status.st_uid != geteuid())) return "is a link, or another user's";
  if (!error) fs::permissions(folder, fs::perms::owner_all, error);
  return error ? cat("cannot be made: ", error.message()) : "";
}

}  // namespace

std::string make_flight_folder(const std::string& base, const std::string& job) {
  const fs::path shared = base.empty() ? flight_base(process_environment) : base;
  const fs::path folder = shared / job;
  // The base that a user names is his own matter.
  const bool shared_by_jobs = base.empty() && process_environment(kFlightFolderVariable).value_or("").empty();
  for (const fs::path& own : shared_by_jobs ? std::vector{shared, folder} : std::vector{folder}) {
    const std::string problem = make_own_folder(own);
    if (problem.empty()) continue;
    log::warning("flight records stay in memory: ", own.string(), " ", problem,
                 "; set flight_recorder.folder or DS_FLIGHT_FOLDER to a folder of your own that can be written to");
    return "";
  }
  remove_old(folder.parent_path());
  return folder;
}

bool holds_records(const std::string& folder) {
  const std::vector<fs::directory_entry> entries = entries_of(folder);
  return std::any_of(entries.begin(), entries.end(), [](const fs::directory_entry& entry) {
    return is_record(entry.path()) || is_stall_folder(entry.path());
  });
}

bool is_stall_folder(const std::string& folder) { return fs::path(folder).filename().string().starts_with(kStall); }

std::string stall_folder(const std::string& folder, int stall) {
  return (fs::path(folder) / cat(kStall, stall)).string();
}

std::string stall_summary(const std::string& folder) { return (fs::path(folder) / kSummary).string(); }

std::string flight_file(const std::string& folder, int rank) {
  return (fs::path(folder) / cat(kRank, rank, kEnding)).string();
}

}  // namespace ds::comm
