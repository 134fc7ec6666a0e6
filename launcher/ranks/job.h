// The ranks of one launch, from the first fork to the exit code. One thread, one poll loop.
//
// With a link to the first ds-launch of many, orders come from there as well, and failures are told there.
//
// Note [Who failed first]
// When a rank dies, the others soon fail too, because their peer is gone. Several deaths may wait when the loop wakes
// up, and waitpid() gives them in no useful order. So each rank has a pidfd in an epoll set, which hands events out in
// the order in which they happened.
#pragma once

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/command_line/notices.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/processes/rank_process.h"
#include "launcher/protocol/node_link.h"
#include "launcher/ranks/failure_report.h"
#include "launcher/ranks/output_relay.h"

namespace ds::launcher {

struct JobPlan {
  std::string file;                                    // program
  std::vector<std::string> words;                      // argv
  std::vector<std::vector<std::string>> environments;  // one for each rank
  std::vector<std::vector<int>> cpus;                  // one for each rank, or empty: not bound
  std::string launch_id;
  std::string flight_folder;  // of the ranks' flight records, see flight_line.h
  std::string rank_log_dir;
  double failure_grace_seconds = 5;
  double signal_grace_seconds = 30;  // 0: no limit
  int first_rank = 0;                // of these ranks among all
  std::string host;                  // what messages call this machine; empty: it is the only one
  NodeLink* link = nullptr;          // to the first ds-launch, when this is not the first; outlives the job
  double link_timeout_seconds = 0;   // of silence on it, once the ranks have started; 0: no limit
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
  bool failed_by_itself() const { return failure_ && !asked_to_end_; }
  // Whether the ranks were ended for nothing but the loss of the link: run() has returned kLinkLost.
  bool ended_for_lost_link() const { return ending_ == Ending::kLinkLost; }

 private:
  struct Rank {
    pid_t pid = 0;
    UniqueFd pidfd;
    bool running = false;
    int status = 0;
  };
  enum class Ending { kNot, kFailure, kSignal, kElsewhere, kLinkLost, kRestart };

  void start_ranks();
  void start_rank_of(int rank, int null_fd);
  void wait_for_something();
  int poll_timeout_ms() const;
  void handle_signals();
  void handle_signal(int number);
  void pass_on(int number);
  void stop_and_continue();
  void handle_orders();
  void end_for_others(const std::string& why, Ending ending);
  void ask_program_to_end();
  void handle_exits();
  void reap_others();
  void on_exit(int rank, int status, long peak_rss_kib);
  void tell_failure();
  std::vector<std::string> failure_lines() const;
  void on_failure(int rank, int status, long peak_rss_kib);
  void enforce_deadline();
  void kill_ranks(const std::string& why);
  void signal_ranks(int number) const;
  std::vector<int> running_ranks() const;
  std::vector<pid_t> groups() const;
  void clean_up();
  int report();

  JobPlan plan_;
  Console& console_;
  Notices& notices_;
  std::unique_ptr<OrphanGuard> guard_;
  OutputRelay relay_;
  UniqueFd signals_, exits_;
  bool hangup_ignored_ = false;
  std::vector<Rank> ranks_;
  int running_ = 0;
  OomCounters oom_before_;
  Ending ending_ = Ending::kNot;
  std::optional<Failure> failure_;
  int ending_signal_ = 0;
  bool interrupted_once_ = false;
  bool asked_to_end_ = false;  // by a signal
  bool killed_ = false;
  bool restart_asked_ = false;
  bool output_loss_said_ = false;
  bool link_loss_said_ = false;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

}  // namespace ds::launcher
