#include "pipeline/schedule/text_file.h"

#include "core/check.h"
#include "core/files/regular_file.h"
#include "core/shown_text.h"
#include "core/utf8.h"

namespace ds::pipeline {

std::string read_text_file(const std::string& path) {
  constexpr size_t kMostBytes = size_t{1} << 30;  // traces of long runs
  FileText file = read_regular_file(path, kMostBytes);
  require<IoError>(file.trouble.empty(), shown_text(path), ": ", file.trouble);
  return std::string(without_byte_order_mark(file.text));
}

}  // namespace ds::pipeline
