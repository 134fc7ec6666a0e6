// Carries the output of the ranks to the console and to their log files.
//
// Rank 0 appears as if it had been started alone: no prefix, its carriage returns are kept, and where ds-launch writes
// to a terminal, rank 0 writes to a pseudo-terminal, so that it draws its progress line. Every line of another rank is
// whole and starts with "[rank N] ".
#pragma once

#include <poll.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/unique_fd.h"
#include "launcher/command_line/console.h"
#include "launcher/ranks/line_reader.h"

namespace ds::launcher {

class OutputRelay {
 public:
  // With a folder, YYYYmmddHHMMSS_rankN.log is opened there for each rank (the folder is made when absent): IoError
  // when that fails.
  // `first_rank`: the number among all of this machine's first rank; ranks are counted from 0 here. `host`: shown
  // beside the rank.
  OutputRelay(Console& console, int ranks, const std::string& log_folder, int first_rank = 0,
              const std::string& host = "");

  // The ends that a new rank writes to; kept open by the caller until the rank runs.
  struct RankEnds {
    UniqueFd out, err;
  };
  RankEnds connect(int rank);

  void append_waits(std::vector<pollfd>& waits) const;  // none while the console is backed up
  void handle(const pollfd& ready);
  void drain(int rank);  // takes all that the rank has written so far
  void drain_all();
  void finish();  // gives out unfinished lines; nothing is read afterwards

  void resize_terminals() const;  // after SIGWINCH
  const LastLines& last_lines(int rank) const { return last_lines_[static_cast<size_t>(rank)]; }
  // Returns trouble with log files, each once; empty when all is well.
  std::string take_trouble();

 private:
  struct Source {
    int rank;
    int stream;  // Console::kOut or kErr
    bool terminal;
    UniqueFd fd;
    LineReader lines;
    std::string held;  // rank 0, not on a terminal: the begin of an unfinished line
  };
  struct Log {
    UniqueFd fd;
    std::string path;
  };

  UniqueFd add_source(int rank, int stream);
  bool is_rank_zero(const Source& source) const { return first_rank_ + source.rank == 0; }
  std::string with_prefix(const Source& source, std::string_view line) const;
  bool read_once(Source& source);
  void take(Source& source, std::string_view bytes);
  void show_rank_zero(Source& source, std::string_view bytes);
  void write_log(int rank, std::string_view bytes);

  Console& console_;
  int first_rank_;
  std::string host_;
  std::vector<Source> sources_;
  std::vector<LastLines> last_lines_;
  std::vector<Log> logs_;
  std::string trouble_;
  std::string buffer_;
};

}  // namespace ds::launcher
