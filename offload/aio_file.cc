#include "offload/aio_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "core/round_up.h"
#include "core/system_call.h"
#include "offload/aio_transfer.h"
#include "offload/io_ring.h"
#include "offload/unnamed_file.h"

namespace ds::offload {
namespace {

constexpr unsigned kMostRequests =
    4096;  // the most requests of a file in flight, with linked ones that have not started

void require_options(const AioOptions& options) {
  require<ConfigError>(options.block_size > 0 && options.block_size % AioFile::alignment() == 0,
                       "aio.block_size: expected a multiple of ", AioFile::alignment(),
                       " bytes (direct IO needs it), found ", options.block_size, "; for example 1048576");
  require<ConfigError>(options.block_size <= int64_t{1} << 30, "aio.block_size: expected at most 1 GiB, found ",
                       options.block_size, "; for example 1048576");
  require<ConfigError>(options.queue_depth > 0, "aio.queue_depth: expected at least 1, found ", options.queue_depth);
  require<ConfigError>(options.intra_op_parallelism > 0, "aio.intra_op_parallelism: expected at least 1, found ",
                       options.intra_op_parallelism);
}

std::string advice(int error, bool writes) {
  switch (error) {
    case 0:
      return "the file became shorter than it was made; nothing but this process may change it";
    case ENOSPC:
    case EDQUOT:
      return "free some space on this disk";
    case EFBIG:
      return "the limit on the size of a file (`ulimit -f`) was lowered after the file was made; raise it";
    default:
      return cat("check the disk (the kernel's log, `dmesg`, says more), and name a folder on a disk that ",
                 writes ? "can be written" : "can be read");
  }
}

}  // namespace

struct AioFile::Impl {
  struct Operation {
    AioTransfer transfer;
    bool writes;
    int64_t offset;
    uint8_t* memory;
  };

  struct Request {
    AioFile::Ticket ticket = 0;
    AioTransfer::Piece piece;
  };

  Impl(const std::string& folder, const std::string& name, int64_t size, const AioOptions& aio, const std::string& what)
      : options(aio),
        file(folder, name, size, alignment(), what),
        bytes(size),
        ring(file.descriptor(), kMostRequests, what) {
    depth = std::min<int64_t>(options.queue_depth * options.intra_op_parallelism, kMostRequests);
    requests.resize(kMostRequests);
    for (uint32_t id = kMostRequests; id-- > 0;) idle.push_back(id);
  }

  void require_intact() const { require<IoError>(broken.empty(), broken); }

  // Requests prepared for a transfer that is given up would be handed over with a later one, and move into memory that
  // holds something else by then. So nothing is handed over any more, and this waits for the requests in flight: after
  // it no memory is touched.
  [[noreturn]] void give_up(const std::string& reason) {
    broken = cat(file.path(), ": ", reason,
                 "; this file is given up, with what it holds: start again from the last checkpoint");
    ring.settle();
    operations.clear();
    throw IoError(broken);
  }

  bool submit(unsigned answers) {
    try {
      return ring.submit(answers);
    } catch (const IoError& error) {
      give_up(error.what());
    }
  }

  Operation& operation(Ticket ticket) {
    require_intact();
    const auto found = operations.find(ticket);
    require(found != operations.end(), file.path(),
            ": expected the ticket of a transfer that nobody has waited for, found ", ticket,
            "; wait for each ticket once");
    return found->second;
  }

  Ticket start(bool writes, int64_t offset, void* memory, int64_t length) {
    require_intact();
    const char* const verb = writes ? "write" : "read";
    require(offset % alignment() == 0 && length % alignment() == 0 &&
                reinterpret_cast<uintptr_t>(memory) % alignment() == 0,
            file.path(), ": ", verb, ": expected offset, length and memory address to be multiples of ", alignment(),
            " bytes, found offset ", offset, ", length ", length, ", address ", memory);
    require(offset >= 0 && length >= 0 && length <= bytes && offset <= bytes - length, file.path(), ": ", verb,
            ": expected a part of the file's ", bytes, " bytes, found ", length, " bytes from offset ", offset);
    const Ticket ticket = ++last;
    operations.emplace(ticket, Operation{{length, options.block_size}, writes, offset, static_cast<uint8_t*>(memory)});
    move_on();
    return ticket;
  }

  void prepare(Ticket ticket, const Operation& of, const AioTransfer::Piece& piece, bool linked) {
    const uint32_t id = idle.back();
    idle.pop_back();
    requests[id] = {ticket, piece};
    ring.prepare(of.writes, of.memory + piece.begin, piece.bytes, of.offset + piece.begin, id, linked);
  }

  // All that is left, as `depth` chains: the n-th piece is in chain n modulo depth. When the kernel breaks a chain, the
  // rest of it comes back cancelled and is linked anew once nothing is in flight.
  void start_chains(Ticket ticket, Operation& of) {
    if (of.transfer.in_flight() > 0) return;
    const int64_t count = std::min<int64_t>(of.transfer.remaining(), static_cast<int64_t>(idle.size()));
    std::vector<AioTransfer::Piece> pieces;
    for (int64_t i = 0; i < count; ++i) pieces.push_back(*of.transfer.next());
    const int64_t chains = std::min(depth, count);
    for (int64_t chain = 0; chain < chains; ++chain) {
      for (int64_t i = chain; i < count; i += chains) prepare(ticket, of, pieces[i], i + chains < count);
    }
  }

  void start_single(Ticket ticket, Operation& of) {
    if (!options.overlap_events && of.transfer.in_flight() > 0) return;
    while (of.transfer.in_flight() < depth && of.transfer.remaining() > 0 && !idle.empty()) {
      prepare(ticket, of, *of.transfer.next(), false);
      if (options.single_submit) submit(0);
    }
  }

  void take_answers() {
    uint64_t id = 0;
    for (int result = 0; ring.take(id, result);) {
      const Request& request = requests.at(id);
      operations.at(request.ticket).transfer.answered(request.piece, result);
      idle.push_back(static_cast<uint32_t>(id));
    }
  }

  // Takes what has come back and starts what may start, oldest transfer first. Returns false when the kernel could not
  // take requests for the moment.
  bool move_on() {
    take_answers();
    for (auto& [ticket, of] : operations) {
      if (options.overlap_events && !options.single_submit) {
        start_chains(ticket, of);
      } else {
        start_single(ticket, of);
      }
    }
    return submit(0);
  }

  // Returns when the transfer is no longer under way.
  void finish(const AioTransfer& transfer) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::seconds kPatience{30};
    auto moved = Clock::now();
    for (;;) {
      bool taken = move_on();
      if (transfer.state() != AioTransfer::State::kUnderWay) return;
      taken = taken && submit(1);
      if (taken) {
        moved = Clock::now();
      } else if (Clock::now() - moved < kPatience) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else {
        give_up(cat("the kernel has taken no requests for ", kPatience.count(), " s (", SystemReason(EAGAIN),
                    "; is this machine out of memory?)"));
      }
    }
  }

  void wait(Ticket ticket) {
    const Operation& of = operation(ticket);
    finish(of.transfer);
    const Operation done = std::move(operations.extract(ticket).mapped());
    if (done.transfer.state() == AioTransfer::State::kDone) return;
    const int error = done.transfer.error();
    throw IoError(cat(file.path(), ": cannot ", done.writes ? "write " : "read ", done.transfer.failed_piece().bytes,
                      " bytes at offset ", done.offset + done.transfer.failed_piece().begin, ": ",
                      error == 0 ? "nothing moved" : cat(SystemReason(error)), "; ", advice(error, done.writes)));
  }

  const AioOptions options;
  UnnamedFile file;
  const int64_t bytes;
  IoRing ring;
  int64_t depth = 0;
  std::map<Ticket, Operation> operations;  // oldest first
  std::vector<Request> requests;           // by id
  std::vector<uint32_t> idle;              // ids
  Ticket last = 0;
  std::string broken;  // why nothing moves any more; empty: all is well
};

AioFile::AioFile(const std::string& folder, const std::string& name, int64_t bytes, const AioOptions& options,
                 const std::string& what) {
  require_options(options);
  require(bytes >= 0, "aio file: expected a size of at least 0 bytes, found ", bytes);
  impl_ = std::make_unique<Impl>(folder, name, round_up(bytes, alignment()), options, what);
}

AioFile::~AioFile() {
  try {
    while (!impl_->operations.empty()) {
      impl_->finish(impl_->operations.begin()->second.transfer);
      impl_->operations.erase(impl_->operations.begin());
    }
  } catch (const Error&) {
    // Given up: nothing is in flight.
  }
}

int64_t AioFile::bytes() const { return impl_->bytes; }

const std::string& AioFile::path() const { return impl_->file.path(); }

int AioFile::descriptor() const { return impl_->file.descriptor(); }

AioFile::Ticket AioFile::read(int64_t offset, void* memory, int64_t bytes) {
  return impl_->start(false, offset, memory, bytes);
}

AioFile::Ticket AioFile::write(int64_t offset, const void* memory, int64_t bytes) {
  return impl_->start(true, offset, const_cast<void*>(memory), bytes);
}

bool AioFile::done(Ticket ticket) {
  impl_->require_intact();
  impl_->move_on();
  return impl_->operation(ticket).transfer.state() != AioTransfer::State::kUnderWay;
}

void AioFile::wait(Ticket ticket) { impl_->wait(ticket); }

}  // namespace ds::offload
