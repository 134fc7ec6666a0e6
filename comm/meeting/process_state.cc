#include "comm/meeting/process_state.h"

#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "core/text.h"

namespace ds::comm {
namespace {

// The fields of /proc/PID/stat from the third on; nothing: there is no such process.
std::optional<std::istringstream> fields_after_name(int64_t process) {
  auto file = classic_stream<std::ifstream>(cat("/proc/", process, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const size_t name_end = line.rfind(')');  // the program's name may hold spaces
  return classic_stream<std::istringstream>(name_end == std::string::npos ? "" : line.substr(name_end + 1));
}

}  // namespace

char state_of_process(int64_t process) {
  auto fields = fields_after_name(process);
  if (!fields) return '-';
  char state = '?';
  *fields >> state;
  return state;
}

uint64_t start_of_process(int64_t process) {
  constexpr int kState = 3;
  constexpr int kStart = 22;
  auto fields = fields_after_name(process);
  if (!fields) return 0;
  std::string field;
  for (int number = kState; *fields >> field; ++number) {
    if (number == kState && (field == "Z" || field == "X")) return 0;
    if (number == kStart) return std::stoull(field);
  }
  return 0;
}

}  // namespace ds::comm
