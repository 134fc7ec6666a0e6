#include "checkpoint/tag_folder.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/index.h"
#include "checkpoint/stored_file.h"
#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/files/dangling_link.h"
#include "core/log.h"
#include "core/system_call.h"
#include "core/unique_fd.h"
#include "core/utf8.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr const char* kIncomplete = ".incomplete";
constexpr const char* kReplaced = ".replaced";
constexpr uint64_t kLongestTag = 4096;  // of a file system, and more

std::string hidden_path(const std::string& save_dir, const std::string& name, const char* ending) {
  return (fs::path(save_dir) / cat(".", name, ending)).string();
}

std::string replaced_path(const std::string& save_dir, const std::string& tag) {
  return hidden_path(save_dir, tag, kReplaced);
}

// Whether the path exists; false where it cannot be looked at.
bool there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

void make_folder_durable(const std::string& folder) {
  const int error = sync_folder(folder);
  require<IoError>(error == 0, folder, ": cannot make durable: ", SystemReason(error));
}

void rename_folder(const std::string& from, const std::string& to) {
  require_system<IoError>(rename(from.c_str(), to.c_str()) == 0, "cannot rename ", from, " to ", to);
}

// Exchanges two folders. Returns false where the file system cannot.
bool exchange(const std::string& one, const std::string& other) {
  return syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0;
}

// Returns the middle of each name in a folder that hidden_path() has made with this ending.
std::vector<std::string> hidden_names(const std::string& save_dir, const std::string& ending) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(save_dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.') && name.ends_with(ending) && name.size() > 1 + ending.size()) {
      names.push_back(name.substr(1, name.size() - 1 - ending.size()));
    }
  }
  return names;
}

constexpr size_t kRunDigits = 16;  // of new_run()

// The tag for which new_save() may have given this name, without dot and ending; empty: none.
std::string tag_of_save(const std::string& name) {
  if (name.size() <= kRunDigits + 1 || name[name.size() - kRunDigits - 1] != '.') return {};
  const size_t dot = name.size() - kRunDigits - 1;
  return name.find_first_not_of("0123456789abcdef", dot + 1) == std::string::npos ? name.substr(0, dot) : std::string();
}

// The tags of this process by their paths, and who has saved them. Never destroyed: an engine in a global may end later
// than any other global.
struct Claims {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<const int>> owners;

  static Claims& of_process() {
    static auto& claims = *new Claims;
    return claims;
  }
  static std::string key_of(const std::string& save_dir, const std::string& tag) {
    std::error_code error;
    const fs::path path = fs::weakly_canonical(save_dir, error);
    return tag_path(error ? save_dir : path.string(), tag);
  }
};

bool is_claimed(const std::string& save_dir, const std::string& tag) {
  Claims& claims = Claims::of_process();
  const std::lock_guard lock(claims.mutex);
  const auto found = claims.owners.find(Claims::key_of(save_dir, tag));
  return found != claims.owners.end() && !found->second.expired();
}

// Note [Saves of other processes]
// A process that begins a save holds a lock (flock) on its folder until it is published or abandoned. So other
// processes tell what is being written from what a dead job left: the latter is removed, the former never, and a second
// save of the same tag is refused. Among the saves of one process TagOwner decides. Where the file system has no locks
// for folders (NFS), nobody is checked.

// The folders that this process has locked, by path. Never destroyed, as Claims.
struct LockedFolders {
  std::mutex mutex;
  std::map<std::string, UniqueFd> descriptors;

  static LockedFolders& of_process() {
    static auto& folders = *new LockedFolders;
    return folders;
  }
};

// Locks the folder; the descriptor holds the lock. False: another process has it.
bool lock_folder(const std::string& path, UniqueFd& descriptor) {
  descriptor = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return !descriptor.valid() || flock(descriptor.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

void keep_locked(const std::string& path) {
  UniqueFd descriptor;
  if (!lock_folder(path, descriptor) || !descriptor.valid()) return;
  LockedFolders& locked = LockedFolders::of_process();
  const std::lock_guard lock(locked.mutex);
  locked.descriptors[path] = std::move(descriptor);
}

void unlock(const std::string& path) {
  LockedFolders& locked = LockedFolders::of_process();
  const std::lock_guard lock(locked.mutex);
  locked.descriptors.erase(path);
}

bool is_written_by_another_process(const std::string& path) {
  LockedFolders& locked = LockedFolders::of_process();
  const std::lock_guard lock(locked.mutex);
  UniqueFd descriptor;
  return !locked.descriptors.contains(path) && !lock_folder(path, descriptor);
}

// If it is there.
void remove_folder(const fs::path& path) noexcept {
  constexpr int kTurns = 20;
  // A rank that removes its own files at the same time makes remove_all() fail.
  for (int turn = 0; turn < kTurns && there(path); ++turn) {
    if (turn > 0) std::this_thread::sleep_for(std::chrono::milliseconds(turn));
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
}

// Where folders cannot be exchanged.
void replace_in_two_steps(const std::string& from, const std::string& to, const std::string& older,
                          const std::function<void(const std::string&)>& make_durable) {
  constexpr int kTurns = 5;
  const std::string save_dir = fs::path(to).parent_path().string();
  std::error_code ignored;
  for (int turn = 1;; ++turn) {
    fs::remove_all(older, ignored);  // which a job left that died after the second rename
    rename_folder(to, older);
    make_durable(save_dir);
    if (rename(from.c_str(), to.c_str()) == 0) break;
    const int error = errno;
    if (there(to) && turn < kTurns) continue;  // a reader took it for one that was cut off, and put it back
    rename(older.c_str(), to.c_str());
    throw IoError(cat("cannot rename ", from, " to ", to, ": ", SystemReason(error)));
  }
  make_durable(save_dir);
  fs::remove_all(older, ignored);
}

}  // namespace

void require_folder_name(const std::string& folder, const char* call) {
  require(!folder.empty(), call, ": expected a folder of checkpoints, found an empty name; pass \".\" for the ",
          "working folder");
  const size_t scheme = folder.find("://");
  const bool is_address = scheme != std::string::npos && scheme > 0 && folder.find('/') > scheme;
  require(!is_address, call, ": expected a folder of checkpoints, found \"", folder, "\", which is no folder of this ",
          "machine; give the path where the store is mounted, or copy the folder there and back by another program");
}

void require_tag(const std::string& tag) {
  require(!tag.empty() && tag.find('/') == std::string::npos && tag.find('\n') == std::string::npos && tag[0] != '.' &&
              tag != kLatest,
          "checkpoint: tag \"", tag, "\": expected the name of a folder without '/', not beginning with '.', and not ",
          "\"latest\"");
}

std::string tag_path(const std::string& save_dir, const std::string& tag) {
  return (fs::path(save_dir) / tag).string();
}

std::string new_run() {
  std::random_device random;
  char number[kRunDigits + 1];
  std::snprintf(number, sizeof number, "%08x%08x", random(), random());
  return number;
}

TagSave new_save(const std::string& save_dir, const std::string& tag) {
  return {save_dir, tag, hidden_path(save_dir, cat(tag, ".", new_run()), kIncomplete)};
}

void TagOwner::claim(const std::string& save_dir, const std::string& tag) const {
  require_tag(tag);
  Claims& claims = Claims::of_process();
  const std::lock_guard lock(claims.mutex);
  std::weak_ptr<const int>& owner = claims.owners[Claims::key_of(save_dir, tag)];
  const std::shared_ptr<const int> other = owner.lock();
  require(!other || other == identity_, "save_checkpoint: \"", tag, "\" in ", save_dir, ": expected a tag that this ",
          "engine has saved, or nobody, found that of another engine of this program, which would lose its ",
          "checkpoint. Give each engine a save_dir of its own (\"", (fs::path(save_dir) / "generator").native(),
          "\"), or tags of its own, or end the other engine before");
  owner = identity_;
}

std::vector<std::string> incomplete_paths(const std::string& save_dir, const std::string& tag) {
  std::vector<std::string> paths;
  for (const std::string& name : hidden_names(save_dir, kIncomplete)) {
    if (tag_of_save(name) == tag) paths.push_back(hidden_path(save_dir, name, kIncomplete));
  }
  return paths;
}

void begin_tag(const TagSave& save) {
  const auto& [save_dir, tag, path] = save;
  require_tag(tag);
  std::error_code error;
  const bool is_new = fs::create_directories(save_dir, error);
  require<IoError>(!error, save_dir, ": cannot make this folder for checkpoints: ", lazy([&] {
    const std::string dangling = dangling_link(save_dir);
    return dangling.empty() ? cat(SystemReason(error)) : dangling;
  }));
  if (is_new) make_folder_durable((fs::canonical(save_dir) / "..").string());
  const fs::path older = tag_path(save_dir, tag);
  const std::string dangling = dangling_link(older);
  require<IoError>(dangling.empty(), older.native(), ": cannot make this folder: ", dangling,
                   "; remove the link, or give another tag");
  require<IoError>(
      !there(older) || there(older / kIndexName) || fs::is_empty(older, error), older.native(),
      ": is there and is no checkpoint of dsengine, so it will not be replaced; give another tag or save_dir");
  for (const std::string& left : incomplete_paths(save_dir, tag)) {
    require(!is_written_by_another_process(left), "checkpoint \"", tag, "\" in ", save_dir, ": expected a tag that ",
            "nobody else is saving, found that another process writes it at the moment, to ", left,
            ". Give each process a save_dir or tags of its own; processes that train one model together are ranks of ",
            "one job");
    unlock(left);
    fs::remove_all(left, error);
    require<IoError>(!error, left, ": cannot remove what an earlier save left: ", SystemReason(error));
  }
  fs::create_directory(path, error);
  require<IoError>(!error, path, ": cannot make this folder: ", SystemReason(error), "; check that ", save_dir,
                   " may be written and has space");
  keep_locked(path);
}

void publish_tag(const TagSave& save, bool durable) {
  const auto& [save_dir, tag, from] = save;
  const auto make_durable = [durable](const std::string& folder) {
    if (durable) make_folder_durable(folder);
  };
  const std::string to = tag_path(save_dir, tag);
  make_durable(from);
  if (!there(to)) {
    rename_folder(from, to);
  } else if (exchange(from, to)) {
    try {
      make_durable(save_dir);
    } catch (...) {
      exchange(from, to);
      throw;
    }
    remove_folder(from);  // the older one is there now
  } else {
    replace_in_two_steps(from, to, replaced_path(save_dir, tag), make_durable);
  }
  make_durable(save_dir);
  unlock(from);
}

void abandon_tag(const TagSave& save) noexcept {
  remove_folder(save.incomplete);
  unlock(save.incomplete);
}

std::optional<std::string> read_latest(const std::string& save_dir) {
  const std::string path = tag_path(save_dir, kLatest);
  if (!there(path)) return std::nullopt;
  const std::string text = read_text(path, kLongestTag);
  std::string_view tag = without_byte_order_mark(text);  // people write it, too
  while (tag.ends_with('\n') || tag.ends_with('\r')) tag.remove_suffix(1);
  return std::string(tag);
}

void write_latest(const std::string& save_dir, const std::string& tag, bool durable) {
  AtomicFile file(tag_path(save_dir, kLatest));
  file.write(tag.data(), tag.size());
  file.commit(durable);
}

void put_back_replaced(const std::string& save_dir) {
  for (const std::string& tag : hidden_names(save_dir, kReplaced)) {
    // Fails where this job may not write, or another one came first.
    if (!there(tag_path(save_dir, tag))) rename(replaced_path(save_dir, tag).c_str(), tag_path(save_dir, tag).c_str());
  }
}

std::vector<TagInfo> whole_tags(const std::string& save_dir) {
  put_back_replaced(save_dir);
  std::vector<TagInfo> tags;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(save_dir, error)) {
    const std::string name = entry.path().filename().string();
    const fs::path index = entry.path() / kIndexName;
    if (name.starts_with('.') || !there(index)) continue;
    try {
      const TrainingState state = index_from(read_text(index.string()), index.string()).state;
      tags.push_back({name, state.global_steps, state.keep_last_tag == name ? state.run : std::string()});
    } catch (const IoError&) {  // not whole
    }
  }
  std::sort(tags.begin(), tags.end(), [](const TagInfo& a, const TagInfo& b) {
    return a.global_steps != b.global_steps ? a.global_steps > b.global_steps : a.tag < b.tag;
  });
  return tags;
}

std::vector<std::string> keep_last_tags(const std::string& save_dir, int64_t count, const std::string& kept,
                                        const std::string& run) {
  for (const std::string& name : hidden_names(save_dir, kIncomplete)) {
    if (is_claimed(save_dir, tag_of_save(name))) continue;  // by an engine that lives, and may write there now
    const std::string path = hidden_path(save_dir, name, kIncomplete);
    if (!is_written_by_another_process(path)) remove_folder(path);
  }
  const std::vector<TagInfo> tags = whole_tags(save_dir);
  for (const std::string& tag : hidden_names(save_dir, kReplaced)) {
    std::error_code ignored;
    if (there(tag_path(save_dir, tag))) fs::remove_all(replaced_path(save_dir, tag), ignored);
  }
  const std::optional<std::string> latest = read_latest(save_dir);
  const auto foreign = std::count_if(tags.begin(), tags.end(),
                                     [&](const TagInfo& tag) { return tag.kept_by.empty() && tag.tag != kept; });
  static std::once_flag told;
  if (foreign > 0) {
    std::call_once(told, [&] {
      log::info("keep_last: ", foreign, " checkpoints in ", save_dir,
                " were saved without it, or by an earlier build, ",
                "and stay; remove by hand what is not needed (said once)");
    });
  }
  std::vector<std::string> removed;
  int64_t staying = 0;
  for (const TagInfo& tag : tags) {
    if (tag.tag != kept && (tag.kept_by.empty() || tag.kept_by != run)) continue;  // somebody else's
    if (tag.tag == kept || staying < count - 1) {
      staying += tag.tag == kept ? 0 : 1;
      continue;
    }
    if (tag.tag == latest) continue;
    // First hidden, so that a crash leaves no part of it under its name.
    const TagSave hidden = new_save(save_dir, tag.tag);
    rename_folder(tag_path(save_dir, tag.tag), hidden.incomplete);
    abandon_tag(hidden);
    removed.push_back(tag.tag);
  }
  return removed;
}

}  // namespace ds::checkpoint
