#include "launcher/command_line/console.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <limits>
#include <utility>

namespace ds::launcher {
namespace {

constexpr size_t kMostQueued = 4 << 20;
constexpr size_t kLongestRedraw = 4096;
constexpr size_t kTerminalStep = 256;  // a terminal reports room when fewer than that many bytes wait in it
constexpr std::string_view kEraseLine = "\r\033[K";

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

}  // namespace

OutputQueue::OutputQueue(int fd) : fd_(fd), step_(PIPE_BUF), socket_(false) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return;
  socket_ = S_ISSOCK(info.st_mode);
  if (S_ISREG(info.st_mode)) step_ = kMostQueued;
  if (isatty(fd)) step_ = kTerminalStep;
}

void OutputQueue::add(std::string_view bytes) {
  if (!lost_) bytes_.append(bytes);
}

void OutputQueue::write_some() {
  while (!empty()) {
    pollfd wait{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (poll(&wait, 1, 0) <= 0) break;
    const char* data = bytes_.data() + begin_;
    const size_t length = std::min(size(), step_);
    const ssize_t written = socket_ ? send(fd_, data, length, MSG_DONTWAIT | MSG_NOSIGNAL) : write(fd_, data, length);
    if (written > 0) {
      begin_ += static_cast<size_t>(written);
    } else if (written < 0 && errno != EAGAIN && errno != EINTR) {
      lost_ = true;
      begin_ = bytes_.size();
    } else if (errno == EAGAIN) {
      break;
    }
  }
  if (empty() || begin_ > kMostQueued) {
    bytes_.erase(0, begin_);
    begin_ = 0;
  }
}

void OpenLine::feed(std::string_view bytes) {
  if (const size_t end = bytes.rfind('\n'); end != std::string_view::npos) {
    clear();
    bytes.remove_prefix(end + 1);
  }
  for (char c : bytes) {
    if (c == '\r') {
      returned_ = true;
    } else {
      if (returned_) clear();
      if (text_.size() < kLongestRedraw) text_ += c;
    }
  }
}

void OpenLine::clear() {
  text_.clear();
  returned_ = false;
}

Console::Output::Output(int fd) : queue(fd), terminal(isatty(fd) == 1) {}

Console::Console(int out_fd, int err_fd)
    : same_device_(same_file(out_fd, err_fd)), outputs_{Output(out_fd), Output(err_fd)} {}

void Console::raw(int stream, std::string_view bytes) {
  Output& to = output(stream);
  to.queue.add(bytes);
  to.open_line.feed(bytes);
  to.queue.write_some();
}

void Console::line(int stream, std::string_view text) {
  Output& to = output(stream);
  const bool open = to.open_line.open();
  if (open) to.queue.add(to.terminal ? kEraseLine : std::string_view("\n"));
  to.queue.add(text);
  to.queue.add("\n");
  if (open && to.terminal) {
    to.queue.add(to.open_line.redraw());
  } else {
    to.open_line.clear();
  }
  to.queue.write_some();
}

void Console::put(std::string_view bytes) {
  outputs_[kOut].queue.add(bytes);
  outputs_[kOut].queue.write_some();
}

bool Console::backed_up() const {
  return outputs_[kOut].queue.size() > kMostQueued || outputs_[kErr].queue.size() > kMostQueued;
}

void Console::append_waits(std::vector<pollfd>& waits) const {
  for (const Output& to : outputs_) {
    if (!to.queue.empty()) waits.push_back({.fd = to.queue.fd(), .events = POLLOUT, .revents = 0});
  }
}

void Console::write_some() {
  for (Output& to : outputs_) to.queue.write_some();
}

void Console::finish(double seconds) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_taken = Clock::now();
  size_t queued = std::numeric_limits<size_t>::max();
  for (;;) {
    write_some();
    const size_t still = outputs_[kOut].queue.size() + outputs_[kErr].queue.size();
    if (still < std::exchange(queued, still)) last_taken = Clock::now();
    std::vector<pollfd> waits;
    append_waits(waits);
    const double left = seconds - std::chrono::duration<double>(Clock::now() - last_taken).count();
    if (waits.empty() || left <= 0) return;
    poll(waits.data(), waits.size(), static_cast<int>(left * 1000) + 1);
  }
}

}  // namespace ds::launcher
