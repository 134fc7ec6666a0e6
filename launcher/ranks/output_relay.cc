#include "launcher/ranks/output_relay.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "core/check.h"
#include "core/system_call.h"
#include "launcher/processes/pipe.h"

namespace ds::launcher {
namespace {

constexpr size_t kReadSize = 64 << 10;
constexpr int kMostReadsPerDrain = 64;  // a pipe holds one; more only comes when a survivor keeps writing

Pipe open_output_pipe() {
  Pipe ends = open_pipe();
  require_system(ends.valid(), "connecting a rank's output: pipe");
  fcntl(ends.reader.get(), F_SETFL, O_NONBLOCK);
  return ends;
}

void copy_terminal_size(int from, int to) {
  winsize size{};
  if (ioctl(from, TIOCGWINSZ, &size) == 0) ioctl(to, TIOCSWINSZ, &size);
}

// A pseudo-terminal that changes no byte: the real terminal does what is to be done.
Pipe open_terminal(int like) {
  Pipe ends{UniqueFd(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK)), UniqueFd()};
  char name[64];
  const bool ready = ends.reader.valid() && grantpt(ends.reader.get()) == 0 && unlockpt(ends.reader.get()) == 0 &&
                     ptsname_r(ends.reader.get(), name, sizeof(name)) == 0;
  if (ready) ends.writer = UniqueFd(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  require_system(ends.writer.valid(), "opening a pseudo-terminal for rank 0; to do without one, send the output ",
                 "through a pipe (ds-launch ... 2>&1 | cat)");
  termios mode{};
  tcgetattr(ends.writer.get(), &mode);
  cfmakeraw(&mode);
  tcsetattr(ends.writer.get(), TCSANOW, &mode);
  copy_terminal_size(like, ends.writer.get());
  return ends;
}

std::string log_prefix(const std::string& folder) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof(stamp), "%Y%m%d%H%M%S", &local);
  return (std::filesystem::path(folder) / stamp).string();
}

}  // namespace

OutputRelay::OutputRelay(Console& console, int ranks, const std::string& log_folder, int first_rank,
                         const std::string& host)
    : console_(console),
      first_rank_(first_rank),
      host_(host),
      last_lines_(static_cast<size_t>(ranks)),
      buffer_(kReadSize, '\0') {
  if (log_folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(log_folder, error);
  if (error) {
    throw IoError(cat("--enable_each_rank_log ", log_folder, ": the folder cannot be made: ", error.message()));
  }
  const std::string prefix = log_prefix(log_folder);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = cat(prefix, "_rank", first_rank + rank, ".log");
    Log log{UniqueFd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)), path};
    require_system<IoError>(log.fd.valid(), "--enable_each_rank_log: cannot write ", path);
    logs_.push_back(std::move(log));
  }
}

OutputRelay::RankEnds OutputRelay::connect(int rank) {
  RankEnds ends;
  ends.out = add_source(rank, Console::kOut);
  const bool shared = rank + first_rank_ == 0 && console_.same_device() && console_.is_terminal(Console::kOut);
  ends.err = shared ? UniqueFd(fcntl(ends.out.get(), F_DUPFD_CLOEXEC, 3)) : add_source(rank, Console::kErr);
  return ends;
}

UniqueFd OutputRelay::add_source(int rank, int stream) {
  const bool terminal = rank + first_rank_ == 0 && console_.is_terminal(stream);
  Pipe ends = terminal ? open_terminal(stream == Console::kOut ? STDOUT_FILENO : STDERR_FILENO) : open_output_pipe();
  sources_.push_back({rank, stream, terminal, std::move(ends.reader), {}, {}});
  return std::move(ends.writer);
}

void OutputRelay::append_waits(std::vector<pollfd>& waits) const {
  if (console_.backed_up()) return;
  for (const Source& source : sources_) {
    if (source.fd.valid()) waits.push_back({.fd = source.fd.get(), .events = POLLIN, .revents = 0});
  }
}

void OutputRelay::handle(const pollfd& ready) {
  if (ready.revents == 0) return;
  for (Source& source : sources_) {
    if (source.fd.valid() && source.fd.get() == ready.fd) read_once(source);
  }
}

// False when there is nothing to read now, or never again.
bool OutputRelay::read_once(Source& source) {
  if (!source.fd.valid()) return false;
  const ssize_t got = read(source.fd.get(), buffer_.data(), buffer_.size());
  if (got > 0) {
    take(source, std::string_view(buffer_).substr(0, static_cast<size_t>(got)));
    return true;
  }
  if (got < 0 && errno == EINTR) return true;
  // A pseudo-terminal says EIO where a pipe says 0: the last writer is gone.
  if (got == 0 || errno != EAGAIN) source.fd.reset();
  return false;
}

void OutputRelay::take(Source& source, std::string_view bytes) {
  write_log(source.rank, bytes);
  const bool shown_as_lines = !is_rank_zero(source);
  source.lines.feed(bytes, [&](std::string_view line) {
    last_lines_[static_cast<size_t>(source.rank)].add(line);
    if (shown_as_lines) console_.line(source.stream, with_prefix(source, line));
  });
  if (!shown_as_lines) show_rank_zero(source, bytes);
}

std::string OutputRelay::with_prefix(const Source& source, std::string_view line) const {
  return cat('[', host_, host_.empty() ? "" : " ", "rank ", first_rank_ + source.rank, "] ", line);
}

void OutputRelay::show_rank_zero(Source& source, std::string_view bytes) {
  if (source.terminal) {
    console_.raw(source.stream, bytes);
    return;
  }
  source.held.append(bytes);
  const size_t end = source.held.find_last_of("\r\n");
  if (end == std::string::npos && source.held.size() < kLongestLine) return;
  const size_t whole = end == std::string::npos ? source.held.size() : end + 1;
  console_.raw(source.stream, std::string_view(source.held).substr(0, whole));
  source.held.erase(0, whole);
}

void OutputRelay::write_log(int rank, std::string_view bytes) {
  if (logs_.empty()) return;
  Log& log = logs_[static_cast<size_t>(rank)];
  while (!bytes.empty() && log.fd.valid()) {
    const ssize_t written = write(log.fd.get(), bytes.data(), bytes.size());
    if (written > 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      trouble_ += cat(trouble_.empty() ? "" : "; ", log.path, ": ", std::strerror(errno), ", the log ends here");
      log.fd.reset();
    }
  }
}

void OutputRelay::drain(int rank) {
  for (Source& source : sources_) {
    for (int reads = 0; source.rank == rank && reads < kMostReadsPerDrain && read_once(source); ++reads) {
    }
  }
}

void OutputRelay::drain_all() {
  for (size_t rank = 0; rank < last_lines_.size(); ++rank) drain(static_cast<int>(rank));
}

void OutputRelay::finish() {
  for (Source& source : sources_) {
    source.fd.reset();
    source.lines.finish([&](std::string_view line) {
      last_lines_[static_cast<size_t>(source.rank)].add(line);
      if (!is_rank_zero(source)) console_.line(source.stream, with_prefix(source, line));
    });
    if (!source.held.empty()) console_.raw(source.stream, source.held);
    source.held.clear();
  }
}

void OutputRelay::resize_terminals() const {
  for (const Source& source : sources_) {
    if (!source.terminal || !source.fd.valid()) continue;
    copy_terminal_size(source.stream == Console::kOut ? STDOUT_FILENO : STDERR_FILENO, source.fd.get());
  }
}

std::string OutputRelay::take_trouble() { return std::exchange(trouble_, {}); }

}  // namespace ds::launcher
