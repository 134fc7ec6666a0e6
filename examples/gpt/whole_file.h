// A file that readers see whole or not at all.
#pragma once

#include <fstream>
#include <string>

namespace gpt {

// Writes beside `path` and takes its place with commit(); destroyed without, it leaves `path` as it was. Not thread
// safe. Throws ds::IoError naming the path and the system's reason.
class WholeFile {
 public:
  // Opens the file beside `path`, which tells early whether `path` can be written.
  explicit WholeFile(std::string path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(const std::string& text);
  void commit();

 private:
  void require_good(const char* what) const;

  std::string path_;
  std::string temporary_;
  std::ofstream out_;
};

}  // namespace gpt
