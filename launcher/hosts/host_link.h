// One host of a job, seen from the first ds-launch: the ssh process, what it says, and what is sent to it.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "launcher/command_line/console.h"
#include "launcher/protocol/message.h"
#include "launcher/ranks/line_reader.h"

namespace ds::launcher {

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
  // What has come, without waiting; without output only what was taken before, so that a host that says more than is
  // read here waits. Throws CommError for bytes that no ds-launch sends.
  std::vector<Message> read(bool with_output);
  // Looks whether the process has ended; true once it has: then read() gives what it had still written.
  bool over();

  bool greeted() const { return reader_.greeted(); }
  int status() const { return status_; }        // as wait4() gives it, when over
  std::vector<std::string> last_words() const;  // on standard error
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

}  // namespace ds::launcher
