// The record that a flight recorder keeps: the last collectives of a rank, where it is in each of its groups, and what
// it is doing. Plain memory of fixed layout, so that it can lie in a mapped file, which outlives the process.
// Torch-free.
//
// Follows the idea of PyTorch's NCCL flight recorder: the rank that hangs is found by what the others have that it has
// not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ds::comm {

// Text of limited length; longer ones are cut.
template <size_t N>
struct FixedText {
  std::array<char, N> bytes;

  void assign(const std::string& text) {
    bytes.fill('\0');
    text.copy(bytes.data(), N - 1);
  }
  static constexpr size_t limit() { return N - 1; }
  std::string text() const { return {bytes.data(), size()}; }
  size_t size() const {
    size_t length = 0;
    while (length < N && bytes[length] != '\0') ++length;
    return length;
  }
};

// How far an operation is.
enum class FlightState : uint8_t {
  kIssued,    // begun; nobody has waited for it yet
  kWaiting,   // a thread waits
  kFinished,  // waited for; CUDA: done on the device
  kReleased,  // nobody will wait: its Work is gone
  kFailed,
};

const char* name_of(FlightState state);

// One operation. Collectives of a group are counted from 1, in the order of issue; so are messages, for each direction,
// peer and tag of a group.
struct FlightEntry {
  uint64_t sequence;                       // among all operations of this rank, from 1; 0: no entry
  uint64_t position;                       // number in its group, counted as said above
  uint64_t signature;                      // hash of this operation alone
  int64_t issued_ns, waited_ns, ended_ns;  // by the rank's clock, see FlightHeader::now_ns; 0: not yet
  int64_t elements;                        // elements of the larger of input and output
  int64_t step;                            // the engine's step when it was issued; 0: not known
  int32_t peer;                            // root, destination or source: a rank of the group; -1: none
  int32_t tag;
  int32_t thread;  // of the rank, from 1: it is held up in the operation; 0: no thread of the host is
  uint16_t group;
  FlightState state;
  bool message;  // send or recv
  FixedText<16> operation;
  FixedText<8> reduction;
  FixedText<12> dtype;
  FixedText<96> label;
  FixedText<32> phase;  // what the program did when it was issued: "backward"; empty: not known
};

// The contract of a group after `position` collectives.
struct ContractMark {
  uint64_t position;  // 0: none yet
  uint64_t contract;
};

inline constexpr std::array<int, 6> kMarkShifts = {0, 3, 6, 10, 14, 20};

// The position of a rank in one of its groups.
struct FlightGroup {
  FixedText<48> name;
  FixedText<192> ranks;  // world ranks in the order of the group, as rank_list_text() writes them
  int32_t own;           // this rank's place in it; -1: several groups that are not told apart
  uint64_t position;     // collectives issued
  uint64_t contract;
  // For each of kMarkShifts the last two positions that its power of two divides: any two ranks that are not too far
  // apart have a position in common.
  std::array<std::array<ContractMark, 2>, kMarkShifts.size()> marks;
};

// The head of a record, which describes the rank.
struct FlightHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t groups;   // number of groups in use
  uint32_t entries;  // entries of the ring
  int32_t rank, world_size;
  uint32_t left;  // 1: the rank has ended in good order
  int64_t process;
  int64_t now_ns;  // the heartbeat: when this was last brought up to date, by a clock of this rank's host
  uint64_t next_sequence;
  int64_t step, micro_step;  // the engine's, when `phase` began
  int64_t phase_ns;
  int32_t threads;  // threads that have used the groups so far
  FixedText<64> host;
  FixedText<48> phase;  // "between steps", "backward", "step", ...
};

inline constexpr uint32_t kFlightGroups = 64;
inline constexpr uint32_t kMostFlightEntries = 65536;

// A copy of a recorder's memory, and what was found out beside it.
struct FlightLog {
  FlightHeader header{};
  std::vector<FlightGroup> groups;
  std::vector<FlightEntry> entries;  // operations in the order of issue; none where only a board was read
  std::vector<std::string> stack;    // functions on the stack of the issuing thread, innermost first; may be empty
  std::map<int, char> neighbours;    // rank of the same host -> state of its process (proc(5)); '-': gone
  double dead_after_seconds = 0;     // the watch's limit of silence; 0: not said
  double silent_seconds = 0;         // since its last heartbeat, when this was put together

  // Returns the oldest operation that a thread waits for, or null.
  const FlightEntry* waiting() const;
  // Returns the newest operation, or null.
  const FlightEntry* last() const;
};

// Returns the bytes of a recorder with so many entries: header, kFlightGroups groups, ring.
size_t flight_bytes(uint32_t entries);
// Writes the magic number into the header of a recorder's memory.
void set_magic(FlightHeader& header);

// Writes a log as bytes: all of it, or a board, which is the header with the groups in use and the entries that
// waiting() and last() need. The board of a rank that waits also has the last message of each direction, peer and tag:
// whoever waits for this rank may have been sent what it waits for.
std::string to_bytes(const FlightLog& log);
std::string to_board(const FlightLog& log);
// Reads the result of to_bytes() or to_board(). Throws ConfigError naming `source`.
FlightLog log_from_bytes(const std::string& bytes, const std::string& source);
// Reads a recorder's memory, which may be written meanwhile: entries that are half written are left out.
FlightLog log_from_memory(const void* memory, size_t size, const std::string& source);
// Reads a file: a recorder's own (mapped), or one with the result of to_bytes(). Throws IoError or ConfigError naming
// it.
FlightLog read_flight_file(const std::string& path);

// Returns the name of an operation: "all_reduce 'bucket 3' (float32[1000], sum, number 17 of group data, step 5)".
std::string operation_text(const FlightEntry& entry, const FlightGroup& group);

}  // namespace ds::comm
