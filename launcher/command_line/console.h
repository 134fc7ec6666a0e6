// The launcher's own standard output and error, shared by all ranks: whole lines, never interleaved, and a progress
// line of rank 0 that stays below them.
//
// Nothing here waits: what a slow reader has not taken yet is queued, and backed_up() tells when to stop reading from
// the ranks. A reader that is gone (EPIPE, a closed terminal) does not end the training: its output is dropped.
#pragma once

#include <poll.h>

#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// Bytes that wait to be written to a descriptor, which the queue does not own.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);

  void add(std::string_view bytes);
  void write_some();  // writes what can be written without waiting
  bool empty() const { return begin_ == bytes_.size(); }
  size_t size() const { return bytes_.size() - begin_; }
  bool lost() const { return lost_; }
  int fd() const { return fd_; }

 private:
  int fd_;
  size_t step_;  // bytes that poll() promises to be writable without waiting
  bool socket_;
  bool lost_ = false;
  std::string bytes_;
  size_t begin_ = 0;
};

// The text on the current, unfinished line of an output. Pure.
class OpenLine {
 public:
  void feed(std::string_view bytes);
  bool open() const { return !text_.empty() || returned_; }
  std::string redraw() const { return returned_ ? text_ + '\r' : text_; }
  void clear();

 private:
  std::string text_;       // since the last line end or carriage return
  bool returned_ = false;  // a carriage return stands after the text
};

class Console {
 public:
  static constexpr int kOut = 0, kErr = 1;

  Console(int out_fd, int err_fd);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  virtual ~Console() = default;

  // Passes bytes of rank 0 on as they are.
  virtual void raw(int stream, std::string_view bytes);
  // Prints a line of its own, given without its end. An unfinished line of rank 0 is drawn again below it on a
  // terminal, and ended before it elsewhere.
  virtual void line(int stream, std::string_view text);

  bool is_terminal(int stream) const { return outputs_[stream].terminal; }
  bool same_device() const { return same_device_; }
  bool backed_up() const;
  bool lost(int stream) const { return outputs_[stream].queue.lost(); }

  void append_waits(std::vector<pollfd>& waits) const;
  void write_some();
  // Waits until all is written, and gives up when nothing has been taken for that long.
  void finish(double seconds);

 protected:
  void put(std::string_view bytes);  // writes them to standard output as they are

 private:
  struct Output {
    explicit Output(int fd);
    OutputQueue queue;
    OpenLine open_line;
    bool terminal;
  };
  Output& output(int stream) { return outputs_[same_device_ ? kOut : stream]; }

  bool same_device_;
  Output outputs_[2];
};

}  // namespace ds::launcher
