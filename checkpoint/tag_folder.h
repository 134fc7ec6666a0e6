// The folders of checkpoints below a save_dir, and how one appears: written under a temporary name, made durable,
// renamed. One job writes into a save_dir at a time; any number may read. Torch-free.
//
//   <save_dir>/<tag>/              a whole checkpoint
//   <save_dir>/.<tag>.incomplete/  one being written, or what a job left that died then
//   <save_dir>/.<tag>.replaced/    where folders cannot be exchanged: the older one, while the new one is renamed
//   <save_dir>/latest              the tag to go on from, as text
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::checkpoint {

// Throws UsageError for a tag that is no plain, visible name of a folder.
void require_tag(const std::string& tag);

std::string tag_path(const std::string& save_dir, const std::string& tag);
std::string incomplete_path(const std::string& save_dir, const std::string& tag);

// Makes an empty incomplete_path(), in place of one that a dead job left. Throws IoError, also when tag_path() is there
// and holds something else than a checkpoint of dsengine: that would be lost.
void begin_tag(const std::string& save_dir, const std::string& tag);
// Renames incomplete_path() to tag_path(), in place of an older one, durably if asked to. Throws IoError; then the
// older one stays.
void publish_tag(const std::string& save_dir, const std::string& tag, bool durable = true);
// Removes incomplete_path(), if it is there.
void abandon_tag(const std::string& save_dir, const std::string& tag) noexcept;

// What the file `latest` says; nothing when there is none.
std::optional<std::string> read_latest(const std::string& save_dir);
void write_latest(const std::string& save_dir, const std::string& tag, bool durable = true);

// Puts back folders whose replacement was cut off; where this job may not write they stay as they are.
void put_back_replaced(const std::string& save_dir);

struct TagInfo {
  std::string tag;
  int64_t global_steps = 0;
};
// Tags whose index is whole, latest step first. Puts back a folder whose replacement was cut off.
std::vector<TagInfo> whole_tags(const std::string& save_dir);
// Removes all whole tags but the `count` with the latest steps, `kept` always staying, and incomplete ones of dead
// jobs.
void keep_last_tags(const std::string& save_dir, int64_t count, const std::string& kept);

}  // namespace ds::checkpoint
