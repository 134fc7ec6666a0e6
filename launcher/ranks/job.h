// The ranks of one launch, from the first fork to the exit code. One thread, one poll loop.
//
// A job with a FirstLauncher (the first ds-launch of many) takes its orders as well, and tells it failures.
//
// Note [Who failed first]
// When a rank dies, the others soon fail too, because their peer is gone. Several deaths may wait when the loop wakes
// up, and waitpid() gives them in no useful order. So each rank has a pidfd in an epoll set, which hands events out in
// the order in which they happened.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/command_line/notices.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/processes/signal_policy.h"
#include "launcher/ranks/failure_report.h"
#include "launcher/ranks/first_launcher.h"
#include "launcher/ranks/joined_ranks.h"
#include "launcher/ranks/output_relay.h"

namespace ds::launcher {

struct JobPlan {
  std::string file;                                    // program
  std::vector<std::string> words;                      // argv
  std::vector<std::vector<std::string>> environments;  // one for each rank
  std::vector<std::string> joined_files;               // one for each rank, see joined_ranks.h; or empty
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
  struct Rank {
    pid_t pid = 0;
    UniqueFd pidfd;
    bool running = false;
    int status = 0;
  };
  enum class Ending { kNot, kFailure, kSignal, kElsewhere, kFirstLost, kRestart };

  void start_ranks();
  void start_rank_of(int rank, int null_fd);
  void wait_for_something();
  void handle_signal(int number);
  void begin_to_end(int number);
  void take_order(const JobOrder& order);
  void end_for_others(const std::string& why, Ending ending);
  void ask_program_to_end();
  void handle_exits();
  void reap_others();
  void on_exit(int rank, int status, long peak_rss_kib);
  std::vector<std::string> failure_lines() const;
  void on_failure(int rank, int status, long peak_rss_kib);
  void enforce_deadline();
  void kill_ranks(const std::string& why);
  void signal_ranks(int number) const;
  std::vector<int> running_ranks() const;
  std::vector<pid_t> groups() const;
  Verbosity own_level() const;
  void tell_absence(int rank) const;
  void tell_no_meeting() const;
  void clean_up();
  int report();

  JobPlan plan_;
  Console& console_;
  Notices& notices_;
  std::unique_ptr<OrphanGuard> guard_;
  OutputRelay relay_;
  JoinedRanks joined_;
  UniqueFd signals_, exits_;
  bool hangup_ignored_ = false;
  std::vector<Rank> ranks_;
  int running_ = 0;
  OomCounters oom_before_;
  Ending ending_ = Ending::kNot;
  std::optional<Failure> failure_;
  SignalPolicy signal_policy_;
  bool killed_ = false;
  bool restart_asked_ = false;
  bool output_loss_said_ = false;
  Deadline deadline_;  // when to kill what is left
};

}  // namespace ds::launcher
