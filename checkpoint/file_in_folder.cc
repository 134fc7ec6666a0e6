#include "checkpoint/file_in_folder.h"

#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/shown_text.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

// models--NAME/snapshots/REVISION, beside models--NAME/blobs.
bool is_blob_of(const fs::path& home, const fs::path& target) {
  const fs::path snapshots = home.parent_path();
  return snapshots.filename() == "snapshots" && target.parent_path() == snapshots.parent_path() / "blobs";
}

}  // namespace

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

std::string file_in_folder(const std::string& folder, const std::string& name, const std::string& where) {
  require<IoError>(is_plain_file_name(name), where,
                   ": expected the name of a file in this folder, without folders, found \"", shown_text(name), "\"");
  const fs::path path = fs::path(folder) / name;
  std::error_code error;
  if (!fs::is_symlink(fs::symlink_status(path, error))) return path.string();
  const fs::path target = fs::canonical(path, error);
  if (error) return path.string();  // leads nowhere
  const fs::path home = fs::canonical(folder, error);
  require<IoError>(!error && (target.parent_path() == home || is_blob_of(home, target)), where, ": file \"",
                   shown_text(name), "\" is a link to ", target.native(),
                   ", outside of this folder: an index reaches no other; put the file itself there");
  return path.string();
}

}  // namespace ds::checkpoint
