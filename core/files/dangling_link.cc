#include "core/files/dangling_link.h"

#include <system_error>

#include "core/text.h"

namespace ds {

std::string dangling_link(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  fs::path seen;
  for (const fs::path& part : path) {
    seen /= part;
    std::error_code error;
    if (!fs::is_symlink(fs::symlink_status(seen, error)) || fs::status(seen, error).type() != fs::file_type::not_found)
      continue;
    const fs::path target = fs::read_symlink(seen, error);
    return cat(seen.native(), " is a symbolic link to ", target.native(), ", which does not exist");
  }
  return {};
}

}  // namespace ds
