// How a transfer is cut, and what becomes of the kernel's answers.
#include <gtest/gtest.h>

#include <cerrno>
#include <vector>

#include "offload/aio_transfer.h"

namespace ds::offload {
namespace {

using Piece = AioTransfer::Piece;
using State = AioTransfer::State;

std::vector<Piece> all_of(AioTransfer& transfer) {
  std::vector<Piece> pieces;
  while (const auto piece = transfer.next()) pieces.push_back(*piece);
  return pieces;
}

TEST(AioTransfer, IsCutIntoBlocks) {
  AioTransfer transfer(2500, 1000);
  EXPECT_EQ(transfer.remaining(), 3);
  EXPECT_EQ(all_of(transfer), (std::vector<Piece>{{0, 1000}, {1000, 1000}, {2000, 500}}));
  EXPECT_EQ(transfer.in_flight(), 3);
  EXPECT_EQ(transfer.remaining(), 0);
  EXPECT_EQ(transfer.state(), State::kUnderWay);
  transfer.answered({1000, 1000}, 1000);
  transfer.answered({2000, 500}, 500);
  EXPECT_EQ(transfer.state(), State::kUnderWay);
  transfer.answered({0, 1000}, 1000);
  EXPECT_EQ(transfer.state(), State::kDone);
}

TEST(AioTransfer, OfNothingIsDone) { EXPECT_EQ(AioTransfer(0, 1000).state(), State::kDone); }

TEST(AioTransfer, ContinuesWhatCameBackShort) {
  AioTransfer transfer(2000, 1000);
  all_of(transfer);
  transfer.answered({0, 1000}, 300);
  transfer.answered({1000, 1000}, 1000);
  EXPECT_EQ(transfer.state(), State::kUnderWay);
  EXPECT_EQ(all_of(transfer), (std::vector<Piece>{{300, 700}}));
  transfer.answered({300, 700}, 1);
  EXPECT_EQ(all_of(transfer), (std::vector<Piece>{{301, 699}}));
  transfer.answered({301, 699}, 699);
  EXPECT_EQ(transfer.state(), State::kDone);
}

TEST(AioTransfer, AsksAgainForWhatWasInterruptedPutOffOrCancelled) {
  for (const int error : {EINTR, EAGAIN, ECANCELED, EFAULT}) {
    AioTransfer transfer(1000, 1000);
    all_of(transfer);
    transfer.answered({0, 1000}, -error);
    EXPECT_EQ(transfer.state(), State::kUnderWay) << error;
    EXPECT_EQ(all_of(transfer), (std::vector<Piece>{{0, 1000}})) << error;
    transfer.answered({0, 1000}, 1000);
    EXPECT_EQ(transfer.state(), State::kDone) << error;
  }
}

TEST(AioTransfer, GivesUpAfterTooManyPutOffsInARow) {
  AioTransfer transfer(2000, 1000);
  for (int i = 0; i < AioTransfer::kMostRetries; ++i) transfer.answered(*transfer.next(), -EAGAIN);
  transfer.answered(*transfer.next(), 10);  // progress: counts from nothing again
  for (int i = 0; i < AioTransfer::kMostRetries; ++i) transfer.answered(*transfer.next(), -EAGAIN);
  EXPECT_EQ(transfer.state(), State::kUnderWay);
  transfer.answered(*transfer.next(), -EAGAIN);
  EXPECT_EQ(transfer.state(), State::kFailed);
  EXPECT_EQ(transfer.error(), EAGAIN);
}

TEST(AioTransfer, ManyPiecesThatArePutOffOnceEachAreNoFailure) {
  constexpr int kPieces = 2 * AioTransfer::kMostRetries;
  AioTransfer transfer(kPieces, 1);
  for (int round = 0; round < 3; ++round) {
    const std::vector<Piece> pieces = all_of(transfer);
    ASSERT_EQ(pieces.size(), kPieces) << round;
    for (const Piece& piece : pieces) transfer.answered(piece, -EFAULT);
    EXPECT_EQ(transfer.state(), State::kUnderWay) << round;
  }
}

TEST(AioTransfer, APieceIsNotGivenUpWhileOthersMove) {
  constexpr int kPieces = 2 * AioTransfer::kMostRetries;
  AioTransfer transfer(kPieces + 1, 1);
  Piece waits = *transfer.next();
  for (int i = 0; i < kPieces; ++i) {
    transfer.answered(waits, -EAGAIN);
    waits = *transfer.next();
    transfer.answered(*transfer.next(), 1);
  }
  EXPECT_EQ(waits, (Piece{0, 1}));
  transfer.answered(waits, 1);
  EXPECT_EQ(transfer.state(), State::kDone);
}

TEST(AioTransfer, FailsWithTheFirstErrorOnceNothingIsInFlight) {
  AioTransfer transfer(4000, 1000);
  transfer.next();
  transfer.next();
  transfer.next();
  transfer.answered({1000, 1000}, -EIO);
  EXPECT_EQ(transfer.state(), State::kUnderWay);
  EXPECT_FALSE(transfer.next().has_value());
  transfer.answered({0, 1000}, -ENOSPC);
  transfer.answered({2000, 1000}, -ECANCELED);
  EXPECT_EQ(transfer.state(), State::kFailed);
  EXPECT_EQ(transfer.error(), EIO);
  EXPECT_EQ(transfer.failed_piece(), (Piece{1000, 1000}));
}

TEST(AioTransfer, FailsWithoutProgress) {
  AioTransfer transfer(1000, 1000);
  transfer.answered(*transfer.next(), 0);
  EXPECT_EQ(transfer.state(), State::kFailed);
  EXPECT_EQ(transfer.error(), 0);
}

}  // namespace
}  // namespace ds::offload
