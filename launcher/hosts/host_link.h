// One host of a job as the first ds-launch knows it: the ssh process, the messages to and from it, and what is known of
// the host from the question whether it is ready to its exit code.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "launcher/command_line/console.h"
#include "launcher/command_line/host_list.h"
#include "launcher/protocol/message.h"
#include "launcher/protocol/node_protocol.h"
#include "launcher/ranks/line_reader.h"

namespace ds::launcher {

// The connection to a host: an ssh process.
class HostLink {
 public:
  // Starts the command (argv; `file` is what to execute). Throws ProgramError or UsageError.
  HostLink(const std::string& file, const std::vector<std::string>& words, const std::vector<std::string>& environment);
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;
  ~HostLink();  // kills what still runs

  void send(const Message& message);
  void hang_up();  // closes the connection: the host ends its ranks
  void kill();

  void append_waits(std::vector<pollfd>& waits, bool with_output) const;
  void write_some() { queue_.write_some(); }
  // The messages that have come, without waiting. With `with_output` false, nothing is read from the process and only
  // what was taken before is returned, so that a host that says too much waits. Throws CommError for bytes that no
  // ds-launch sends.
  std::vector<Message> read(bool with_output);
  // Whether the process has ended; then read() returns what it had still written.
  bool over();

  bool greeted() const { return reader_.greeted(); }
  int status() const { return status_; }        // as wait4() gives it, when over
  std::vector<std::string> last_words() const;  // the last lines on its standard error
  pid_t pid() const { return pid_; }

 private:
  bool take_output();
  void take_errors();

  UniqueFd in_, out_, err_;
  OutputQueue queue_;
  MessageReader reader_{false};
  LineReader error_lines_;
  LastLines errors_;
  pid_t pid_ = 0;
  bool running_ = false;
  int status_ = 0;
};

// A host of the job.
struct HostMember {
  Host host;
  std::unique_ptr<HostLink> link;
  std::optional<CheckReply> reply;
  std::string trouble;  // why there is no reply
  ClockDifference clock;
  std::optional<FailureMessage> failure;
  std::optional<int> exit_code;
  bool answers_since_kill = false;  // its ds-launch waits for ranks that were killed
  bool over = false;                // its ssh has ended
};

using HostMembers = std::vector<HostMember>;

}  // namespace ds::launcher
