// The folders of checkpoints below a save_dir, and how one appears: written under a temporary name, made durable,
// renamed. One job writes into a save_dir at a time; any number may read. Torch-free.
//
//   <save_dir>/<tag>/              a whole checkpoint
//   <save_dir>/.<tag>.<16 hex digits>.incomplete/
//                                  one being written, or what a job left that died then
//   <save_dir>/.<tag>.replaced/    where folders cannot be exchanged: the older one, while the new one is renamed
//   <save_dir>/latest              the tag to go on from, as text
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ds::checkpoint {

// Throws UsageError for a name of a folder of checkpoints that is empty, or the address of an object store:
// "s3://bucket" would become a folder "s3:" here. `call` is the program's: "save_checkpoint".
void require_folder_name(const std::string& folder, const char* call);
// Throws UsageError for a tag that is no plain, visible name of a folder.
void require_tag(const std::string& tag);

std::string tag_path(const std::string& save_dir, const std::string& tag);

// One save of a tag, and the folder that is its own until it is whole. No two saves have the same: a host that has an
// earlier one's in its cache (NFS), or a rank of a dead job that still writes, would write into another's.
struct TagSave {
  std::string save_dir;
  std::string tag;
  std::string incomplete;  // path
};
// Begins a save under a new name of a folder, which is not made yet.
TagSave new_save(const std::string& save_dir, const std::string& tag);
// Returns the paths of the folders of all saves of this tag that are not over, or that dead jobs left.
std::vector<std::string> incomplete_paths(const std::string& save_dir, const std::string& tag);

// The number of a run, 16 hex digits, another one for each call.
std::string new_run();

// Whoever saves checkpoints in this process, an engine say. What it has saved is its own as long as it lives: another
// one's save into the same tag would lose a checkpoint that somebody still counts on. Thread safe.
class TagOwner {
 public:
  // Notes the tag as the owner's. Throws UsageError where it is that of another one, which lives, and as require_tag().
  void claim(const std::string& save_dir, const std::string& tag) const;

 private:
  std::shared_ptr<const int> identity_ = std::make_shared<const int>();
};

// Makes the folder, and removes those that dead jobs left. Throws IoError, also when tag_path() is there and holds
// something else than a checkpoint of dsengine: that would be lost. Throws UsageError while another process writes the
// tag.
void begin_tag(const TagSave& save);
// Renames the folder to tag_path(), in place of an older one, durably if asked to. Throws IoError; then the older one
// stays.
void publish_tag(const TagSave& save, bool durable = true);
// Removes the folder, if it is there.
void abandon_tag(const TagSave& save) noexcept;

// Returns the tag that the file `latest` names; nothing when there is none.
std::optional<std::string> read_latest(const std::string& save_dir);
void write_latest(const std::string& save_dir, const std::string& tag, bool durable = true);

// Puts back folders whose replacement was cut off; where this job may not write they stay as they are.
void put_back_replaced(const std::string& save_dir);

struct TagInfo {
  std::string tag;
  int64_t global_steps = 0;
  std::string kept_by;  // the run whose keep_last counts it; empty: none does
};
// Returns the tags whose index is whole, latest step first. Puts back a folder whose replacement was cut off.
std::vector<TagInfo> whole_tags(const std::string& save_dir);
// Removes the tags that keep_last of the run `run` has saved, but for the `count` with the latest steps, among them
// `kept`, which always stays, as what `latest` names does. Returns them. Removes incomplete tags of dead jobs too.
std::vector<std::string> keep_last_tags(const std::string& save_dir, int64_t count, const std::string& kept,
                                        const std::string& run);

}  // namespace ds::checkpoint
