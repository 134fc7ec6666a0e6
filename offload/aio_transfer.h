// One read or write of a file, cut into requests: which to make next, and what the answers mean. Torch-free, no IO.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ds::offload {

// The progress of one transfer. Not thread safe.
class AioTransfer {
 public:
  // A part of the transfer, in bytes from its start.
  struct Piece {
    int64_t begin = 0;
    int64_t bytes = 0;
    int retries = 0;           // in a row
    int64_t bytes_before = 0;  // bytes that the transfer had moved at the last retry
    bool operator==(const Piece& other) const { return begin == other.begin && bytes == other.bytes; }
  };
  enum class State { kUnderWay, kDone, kFailed };  // kDone, kFailed: nothing is in flight any more

  // Cuts the transfer into pieces of `block_size` (> 0) bytes, the last one shorter.
  AioTransfer(int64_t bytes, int64_t block_size) : bytes_(bytes), block_size_(block_size) {}

  // The next piece to ask for: first the rest of pieces that came back short or not at all. Nothing once all is asked
  // for, or the transfer has failed.
  std::optional<Piece> next();
  // The number of pieces that next() would give now.
  int64_t remaining() const;
  // Takes the kernel's answer to a piece of next(): bytes moved, or -errno. A piece that moved in part is continued;
  // one that was interrupted (EINTR), put off (EAGAIN), cancelled with a broken chain (ECANCELED), or whose turn came
  // after the end of the thread that asked for it (EFAULT), is asked for again. Any other error, no progress at all, or
  // more than kMostRetries of these for one piece while no piece moves (ECANCELED aside), fail the transfer.
  void answered(const Piece& piece, int result);

  State state() const;
  int64_t in_flight() const { return in_flight_; }
  // Why a transfer failed: errno, or 0 when the kernel moved nothing without an error (the end of the file); and where.
  int error() const { return error_; }
  const Piece& failed_piece() const { return failed_piece_; }

  static constexpr int kMostRetries = 1000;

 private:
  void fail(const Piece& piece, int error);

  int64_t bytes_;
  int64_t block_size_;
  int64_t asked_ = 0;  // bytes from the start that were handed out once
  int64_t in_flight_ = 0;
  int64_t moved_ = 0;         // bytes
  std::vector<Piece> again_;  // last one first
  bool failed_ = false;
  int error_ = 0;
  Piece failed_piece_;
};

}  // namespace ds::offload
