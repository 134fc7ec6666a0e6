#include "checkpoint/host_tables.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

// Of a tensor, or of a part of one, runs of elements: begin and end. They do not overlap.
using Runs = std::map<int64_t, int64_t>;
using RunsOf = std::map<std::pair<std::string, int>, Runs>;

std::pair<std::string, int> key_of(const Piece& piece) { return {piece.path, piece.part ? piece.part->index : -1}; }

RunsOf runs_of(const Index& index) {
  RunsOf runs;
  for (const auto& [name, file] : index.files) {
    for (const Piece& piece : file.pieces) runs[key_of(piece)][piece.offset] = piece.offset + piece.length;
  }
  return runs;
}

// Elements of [begin, end) that the runs have.
int64_t covered(const Runs& runs, int64_t begin, int64_t end) {
  int64_t count = 0;
  auto run = runs.upper_bound(begin);
  if (run != runs.begin()) --run;
  for (; run != runs.end() && run->first < end; ++run) {
    count += std::max<int64_t>(0, std::min(end, run->second) - std::max(begin, run->first));
  }
  return count;
}

}  // namespace

void leave_out_covered(Index& other, const Index& here) {
  const RunsOf runs = runs_of(here);
  const auto is_here = [&](const Piece& piece) {
    const auto found = runs.find(key_of(piece));
    if (found == runs.end()) return false;
    const int64_t count = covered(found->second, piece.offset, piece.offset + piece.length);
    require<IoError>(count == 0 || count == piece.length, "checkpoint: \"", piece.path, "\": this host has ", count,
                     " of the ", piece.length, " elements from ", piece.offset, " on that another host has");
    return piece.length == 0 || count == piece.length;
  };
  for (auto& [name, file] : other.files) std::erase_if(file.pieces, is_here);
}

}  // namespace ds::checkpoint
