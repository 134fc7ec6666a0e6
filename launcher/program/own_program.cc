#include "launcher/program/own_program.h"

#include <fcntl.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <filesystem>
#include <iomanip>
#include <memory>
#include <sstream>
#include <vector>

#include "core/check.h"
#include "core/system_call.h"
#include "core/text.h"
#include "core/unique_fd.h"

namespace ds::launcher {
namespace {

constexpr size_t kHashedAtOnce = 1 << 20;

}  // namespace

std::string file_hash(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  require_system<IoError>(file.valid(), "reading ", path);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(state.get());
  std::vector<char> buffer(kHashedAtOnce);
  for (ssize_t got; (got = read(file.get(), buffer.data(), buffer.size())) != 0;) {
    require_system<IoError>(got > 0, "reading ", path);
    XXH3_128bits_update(state.get(), buffer.data(), static_cast<size_t>(got));
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  auto text = classic_stream<std::ostringstream>();
  text << std::hex << std::setfill('0') << std::setw(16) << hash.high64 << std::setw(16) << hash.low64;
  return std::move(text).str();
}

OwnProgram find_own_program() {
  constexpr const char* kLink = "/proc/self/exe";
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink(kLink, error);
  if (error) throw IoError(cat("reading ", kLink, ": ", error.message()));
  return {.path = path, .hash = file_hash(kLink)};  // of what runs, whatever has that name by now
}

}  // namespace ds::launcher
