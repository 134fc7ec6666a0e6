// The folders and files of flight records.
#pragma once

#include <string>

namespace ds::comm {

// Makes BASE/JOB (`base` empty: that of core/flight_job.h) for this user alone, and removes folders of other jobs that
// hold nothing but records older than a week that nobody writes to. Returns it, or an empty text after a warning when
// it cannot be made.
std::string make_flight_folder(const std::string& base, const std::string& job);

// Returns the path of a rank's record in the folder.
std::string flight_file(const std::string& folder, int rank);
// Whether a folder holds the record of any rank, and whether it is that of a stall.
bool holds_records(const std::string& folder);
bool is_stall_folder(const std::string& folder);
// Returns the folder for the records of stall number `stall` in a job's folder, and the file in it that says what they
// mean.
std::string stall_folder(const std::string& folder, int stall);
std::string stall_summary(const std::string& folder);

}  // namespace ds::comm
