#include "comm/meeting/quiet_store.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <mutex>

namespace ds::comm {
namespace {

struct Level {
  std::mutex mutex;
  int users = 0;
  int before = 0;
  int ours = 0;
};

// Not destroyed: the watch's threads may outlive main().
Level& level() {
  static auto& made = *new Level();
  return made;
}

}  // namespace

QuietStore::QuietStore() {
  constexpr int kErrors = 2;
  const std::lock_guard lock(level().mutex);
  if (level().users++ > 0) return;
  level().before = FLAGS_caffe2_log_level;
  level().ours = std::max(FLAGS_caffe2_log_level, kErrors);
  FLAGS_caffe2_log_level = level().ours;
}

QuietStore::~QuietStore() {
  const std::lock_guard lock(level().mutex);
  // Another level is somebody else's by now.
  if (--level().users == 0 && FLAGS_caffe2_log_level == level().ours) FLAGS_caffe2_log_level = level().before;
}

}  // namespace ds::comm
