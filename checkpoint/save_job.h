// One save, seen from one rank: its files, its table, and on rank 0 the publication.
//
// Ranks meet in the file system, not over the network, so that a save can end beside training: each leaves
// rank-NNNNN.json (its part of the index) in the incomplete folder when its files are durable, or rank-NNNNN.failed.
// Rank 0 joins the tables into index.json and renames the folder.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/rank_files.h"
#include "checkpoint/source/training_state.h"
#include "checkpoint/tag_folder.h"

namespace ds::checkpoint {

// Where and how a checkpoint is saved.
struct SaveTarget {
  TagSave save;
  int rank = 0;
  int ranks = 1;
  bool save_latest = true;
  int64_t keep_last = 0;     // whole tags that stay of those that its run has saved with keep_last; 0: all
  bool durable = true;       // on the disk when it is published; else a crash of the machine may damage it
  bool of_one_host = false;  // the folder is for the ranks of this host only, see Index
  bool mock = false;         // nothing is written and nothing published: checksums are all that is made of the state
};

// One save of one rank. begin_tag() comes before any rank makes one. The methods are called in this order, from one
// thread at a time; cancel() from any.
class SaveJob {
 public:
  explicit SaveJob(SaveTarget target) : target_(std::move(target)) {}
  const SaveTarget& target() const { return target_; }

  // Creates the files. Throws IoError.
  void open(const std::vector<PlannedPiece>& pieces);
  void write(size_t piece, const at::Tensor& values);
  // Completes files and table. Throws IoError.
  void finish();
  // Ends the save after a failure; called in place of finish().
  void give_up() noexcept;
  // Called with of_one_host, between finish() and publish(), by the rank that publishes. table_of() returns the table
  // of a rank that has finished here; put_table() sets what publish() takes for the table of a rank of another host,
  // whose files lie there.
  nlohmann::json table_of(int rank) const;
  void put_table(int rank, const nlohmann::json& table);

  // Called by rank 0, or the first one of a host: waits for the tables of all ranks, then publishes. Throws IoError,
  // naming the rank, when one gave up, when `patience` is over, or cancel() was called; nothing of the save is left
  // then.
  void publish(TrainingState state, std::map<std::string, std::string> aliases, std::chrono::milliseconds patience);
  void cancel() { cancelled_ = true; }
  // Lets publish() wait for others at most `patience` from now on. May be called from any thread.
  void hurry(std::chrono::milliseconds patience) { latest_end_ = std::chrono::steady_clock::now() + patience; }

 private:
  void remove_old_tags(const std::string& run) const;
  void join_tables(Index& index, std::chrono::milliseconds patience);

  SaveTarget target_;
  std::unique_ptr<RankFiles> files_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<std::chrono::steady_clock::time_point> latest_end_ = std::chrono::steady_clock::time_point::max();
};

}  // namespace ds::checkpoint
