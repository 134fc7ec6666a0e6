#include "offload/aio_transfer.h"

#include <algorithm>
#include <cerrno>

namespace ds::offload {

std::optional<AioTransfer::Piece> AioTransfer::next() {
  if (failed_) return std::nullopt;
  Piece piece;
  if (!again_.empty()) {
    piece = again_.back();
    again_.pop_back();
  } else if (asked_ < bytes_) {
    piece = {asked_, std::min(block_size_, bytes_ - asked_)};
    asked_ += piece.bytes;
  } else {
    return std::nullopt;
  }
  ++in_flight_;
  return piece;
}

int64_t AioTransfer::remaining() const {
  if (failed_) return 0;
  return static_cast<int64_t>(again_.size()) + (bytes_ - asked_ + block_size_ - 1) / block_size_;
}

void AioTransfer::answered(const Piece& piece, int result) {
  --in_flight_;
  if (failed_) return;
  if (result > 0) {
    moved_ += result;
    if (result < piece.bytes) again_.push_back({piece.begin + result, piece.bytes - result});
    return;
  }
  if (result == -ECANCELED) {
    again_.push_back(piece);
    return;
  }
  Piece again = piece;
  if (again.bytes_before != moved_) again.retries = 0;
  again.bytes_before = moved_;
  const bool retry = (result == -EAGAIN || result == -EINTR || result == -EFAULT) && ++again.retries <= kMostRetries;
  if (!retry) return fail(piece, -result);
  again_.push_back(again);
}

void AioTransfer::fail(const Piece& piece, int error) {
  failed_ = true;
  error_ = error;
  failed_piece_ = piece;
}

AioTransfer::State AioTransfer::state() const {
  if (in_flight_ > 0 || remaining() > 0) return State::kUnderWay;
  return failed_ ? State::kFailed : State::kDone;
}

}  // namespace ds::offload
