#include "checkpoint/save_job.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "checkpoint/stored_file.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/log.h"
#include "core/text.h"
#include "core/unique_fd.h"

namespace ds::checkpoint {
namespace {

std::string rank_file(const SaveTarget& target, int rank, const char* ending) {
  char name[64];
  std::snprintf(name, sizeof name, "rank-%05d.%s", rank, ending);
  return (std::filesystem::path(target.save.incomplete) / name).string();
}

// Over NFS a name that was not there stays away for the life of the cache of attributes, 30 s and more. Opening the
// folder asks the server (close-to-open consistency).
void ask_again(const std::string& folder) {
  const UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

}  // namespace

void SaveJob::open(const std::vector<PlannedPiece>& pieces) {
  if (target_.mock) return;
  files_ = std::make_unique<RankFiles>(target_.save.incomplete, target_.rank, target_.ranks, pieces);
}

void SaveJob::write(size_t piece, const at::Tensor& values) {
  if (!target_.mock) return files_->write(piece, values);
  // Makes the checksums that a written run of blocks would get.
  static_cast<void>(block_checksums(values.const_data_ptr(), values.nbytes()));
}

void SaveJob::finish() {
  if (target_.mock) return;
  const Index part = files_->finish(target_.durable);
  files_.reset();
  // Rank 0 reads it now, and removes it before anything is published.
  write_whole_file(rank_file(target_, target_.rank, "json"), sealed(table_to_json(part)), /*durable=*/false);
}

void SaveJob::give_up() noexcept {
  if (target_.mock) return;
  try {
    files_.reset();
    classic_stream<std::ofstream>(rank_file(target_, target_.rank, "failed")).put('\n');
  } catch (...) {  // rank 0 learns of it by its patience
  }
}

nlohmann::json SaveJob::table_of(int rank) const {
  const std::string path = rank_file(target_, rank, "json");
  return unsealed(read_text(path), path);
}

void SaveJob::put_table(int rank, const nlohmann::json& table) {
  write_whole_file(rank_file(target_, rank, "json"), sealed(table), /*durable=*/false);
}

void SaveJob::join_tables(Index& index, std::chrono::milliseconds patience) {
  const auto begin = std::chrono::steady_clock::now();
  const auto limit = begin + patience;
  std::chrono::milliseconds pause(1);
  for (int rank = 0; rank < target_.ranks; ++rank) {
    const std::string path = rank_file(target_, rank, "json");
    while (!std::filesystem::exists(path)) {
      require<IoError>(!std::filesystem::exists(rank_file(target_, rank, "failed")), "checkpoint \"", target_.save.tag,
                       "\" in ", target_.save.save_dir, ": rank ", rank,
                       " could not write its part, its message says why");
      require<IoError>(!cancelled_, "checkpoint \"", target_.save.tag, "\" in ", target_.save.save_dir,
                       ": given up before rank ", rank, " had written its part");
      const auto now = std::chrono::steady_clock::now();
      require<IoError>(now < std::min(limit, latest_end_.load()), "checkpoint \"", target_.save.tag, "\": no file ",
                       path, " from rank ", rank, " after ",
                       std::chrono::duration<double>(std::min(now, limit) - begin).count(),
                       " s. Either this rank is gone or late, or its host does not see the same folder: save_dir has ",
                       "to be on a file system that all hosts share");
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(100));
      ask_again(target_.save.incomplete);
    }
    add_table(index, unsealed(read_text(path), path), path);
  }
}

// Does not throw: what was saved stands, whatever becomes of the old tags.
void SaveJob::remove_old_tags(const std::string& run) const {
  try {
    const auto& [save_dir, tag, incomplete] = target_.save;
    for (const std::string& removed : keep_last_tags(save_dir, target_.keep_last, tag, run)) {
      log::info("checkpoint \"", tag, "\" is saved, and with keep_last ", target_.keep_last, " the older \"", removed,
                "\" in ", save_dir, " is removed");
    }
  } catch (const std::exception& error) {
    log::warning("checkpoint \"", target_.save.tag, "\" is saved, but older ones could not be removed: ", error.what());
  }
}

void SaveJob::publish(TrainingState state, std::map<std::string, std::string> aliases,
                      std::chrono::milliseconds patience) {
  if (target_.mock) return;
  const std::string run = state.run;
  try {
    Index index;
    index.state = std::move(state);
    index.aliases = std::move(aliases);
    index.of_one_host = target_.of_one_host;
    join_tables(index, patience);
    const std::string text = to_text(index);
    const std::string path = (std::filesystem::path(target_.save.incomplete) / kIndexName).string();
    index_from(text, path);  // that it can be read again, before it takes the place of an older one
    for (int rank = 0; rank < target_.ranks; ++rank) std::filesystem::remove(rank_file(target_, rank, "json"));
    write_whole_file(path, text, target_.durable);
    publish_tag(target_.save, target_.durable);
  } catch (const std::filesystem::filesystem_error& error) {
    abandon_tag(target_.save);
    throw IoError(error.what());
  } catch (...) {
    abandon_tag(target_.save);
    throw;
  }
  if (target_.keep_last > 0) remove_old_tags(run);
  if (!target_.save_latest) return;
  try {
    write_latest(target_.save.save_dir, target_.save.tag, target_.durable);
  } catch (const IoError& error) {
    throw IoError(
        cat("it is saved, but `latest` could not be changed, so a load without a tag takes another: ", error.what()));
  }
}

}  // namespace ds::checkpoint
