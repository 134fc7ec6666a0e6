// Where the report of a failure sends the user who wants to know what the ranks did last.
#pragma once

#include <string>
#include <vector>

namespace ds::launcher {

// The folder of the flight records of ranks with this environment; see core/flight_job.h. Pure, but for the user's id
// and whether the temporary folder is there.
std::string flight_folder(const std::vector<std::string>& environment);

// Empty where ranks have left no records in `folder`. `host`: what messages call this machine; empty: the only one.
std::vector<std::string> flight_lines(const std::string& folder, const std::string& host);

}  // namespace ds::launcher
