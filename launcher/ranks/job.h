// The ranks of one launch, from the first fork to the exit code. One thread, one poll loop.
//
// Note [Who failed first]
// The rank whose end comes first is to blame, unless its last lines only tell of another rank's end: a rank that throws
// gives up its communicator, whereupon its peers throw too, and may end before it. Then the others get a moment to end
// by themselves, and the first of them with an error of its own is to blame. Nobody is told of a failure until that is
// known; an order to end for the failure on another host comes before it.
//
// A job with a FirstLauncher (the first ds-launch of many) takes its orders as well, and tells it failures.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/command_line/notices.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/rank_processes.h"
#include "launcher/processes/signal_policy.h"
#include "launcher/ranks/failure_report.h"
#include "launcher/ranks/first_launcher.h"
#include "launcher/ranks/output_relay.h"

namespace ds::launcher {

// Tells which ranks have joined the others; see core/files/joined_file.h.
class JoinedRanks {
 public:
  // `files`: the file of each rank; empty: it is not known which ranks have joined.
  explicit JoinedRanks(std::vector<std::string> files) : files_(std::move(files)) {}
  JoinedRanks(const JoinedRanks&) = delete;
  JoinedRanks& operator=(const JoinedRanks&) = delete;
  ~JoinedRanks();  // removes the files

  bool has(size_t rank) const;
  bool any() const;

 private:
  std::vector<std::string> files_;
};

// Whether the program at `file` is linked with dsengine, as far as its text tells: a script that starts one, or one
// that has the library inside, is none.
bool uses_dsengine(const std::string& file);

struct JobPlan {
  std::string file;                                    // program
  std::vector<std::string> words;                      // argv
  std::vector<std::vector<std::string>> environments;  // one for each rank
  std::vector<std::string> joined_files;               // one for each rank, see JoinedRanks; or empty
  std::vector<std::vector<int>> cpus;                  // one for each rank, or empty: not bound
  std::string launch_id;
  std::string flight_folder;  // the ranks' flight records, see failure_report.h
  std::string rank_log_dir;
  double failure_grace_seconds = 5;
  double signal_grace_seconds = 30;  // 0: no limit
  int first_rank = 0;                // the first of these ranks among all
  std::string host;                  // what messages call this machine; empty: it is the only one
  FirstLauncher* first = nullptr;    // null when it is this ds-launch; outlives the job
  std::string restart_file;          // see core/restart_request.h; empty: none
};

class Job {
 public:
  // Blocks the signals that it handles and starts the orphan guard; starts no rank yet.
  Job(JobPlan plan, Console& console, Notices& notices);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();  // kills what still runs

  // Starts the ranks, waits for all of them and reports. Returns the exit code of ds-launch: that of the first failed
  // rank, 128 + signal after a signal that ended ranks, else 0. Throws ProgramError or UsageError when a rank cannot
  // start; those started before it are ended.
  int run();

  // Whether a rank failed that nobody had asked to end: the job may start again.
  bool failed_by_itself() const { return failure_ && !signal_policy_.asked_to_end(); }
  // Whether the ranks were ended for nothing but the loss of the first ds-launch; run() has returned 0, for want of a
  // better code.
  bool ended_without_first() const { return ending_ == Ending::kFirstLost; }

 private:
  enum class Ending { kNot, kFailure, kSignal, kElsewhere, kFirstLost, kRestart };

  void start_ranks();
  void wait_for_something();
  void handle_signal(int number);
  void begin_to_end(int number);
  void take_order(const JobOrder& order);
  void end_for_others(const std::string& why, Ending ending);
  void ask_program_to_end();
  void on_exit(const RankExit& ended);
  std::vector<std::string> failure_lines() const;
  void on_failure(const RankExit& ended);
  void end_for_failure();
  void enforce_deadline();
  void kill_ranks(const std::string& why);
  void tell_absence(int rank) const;
  void tell_no_meeting() const;
  void clean_up();
  int report();

  JobPlan plan_;
  Console& console_;
  Notices& notices_;
  RankProcesses processes_;  // before what opens descriptors
  OutputRelay relay_;
  JoinedRanks joined_;
  UniqueFd signals_;
  bool hangup_ignored_ = false;
  OomCounters oom_before_;
  Ending ending_ = Ending::kNot;
  std::optional<Failure> failure_;
  // Until when a rank with an error of its own may take the place of failure_, see Note [Who failed first]; none: it is
  // decided.
  std::optional<Deadline> decided_at_;
  SignalPolicy signal_policy_;
  bool killed_ = false;
  bool restart_asked_ = false;
  bool output_loss_said_ = false;
  Deadline deadline_;  // when to kill what is left
};

}  // namespace ds::launcher
