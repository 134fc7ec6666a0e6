// Tells which ranks have joined the others; see core/files/joined_file.h.
#pragma once

#include <string>
#include <vector>

namespace ds::launcher {

class JoinedRanks {
 public:
  // `files`: the file of each rank; empty: it is not known which ranks have joined.
  explicit JoinedRanks(std::vector<std::string> files) : files_(std::move(files)) {}
  JoinedRanks(const JoinedRanks&) = delete;
  JoinedRanks& operator=(const JoinedRanks&) = delete;
  ~JoinedRanks();  // removes the files

  bool has(size_t rank) const;
  bool any() const;

 private:
  std::vector<std::string> files_;
};

// Whether the program at `file` is linked with dsengine, as far as its text tells: a script that starts one, or one
// that has the library inside, is none.
bool uses_dsengine(const std::string& file);

}  // namespace ds::launcher
