#include "checkpoint/source/part_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/source/tensor_parts.h"
#include "core/check.h"
#include "core/split/part_runs.h"
#include "core/tensor_check.h"

namespace ds::checkpoint {
namespace {

// Runs that lie near one another in the whole are read together, with what is between them.
class Windows {
 public:
  Windows(Source& source, const std::string& path, const at::Tensor& destination)
      : source_(source),
        path_(path),
        destination_(destination),
        element_(c10::elementSize(destination.scalar_type())),
        most_(kPartBytes / static_cast<int64_t>(element_)) {}

  // Elements from `whole` on are the destination's from `to` on; ascending.
  void add(int64_t whole, int64_t to, int64_t length) {
    if (!runs_.empty() && whole + length - runs_.front().whole > most_) read();
    runs_.push_back({whole, to, length});
  }

  void read() {
    if (runs_.empty()) return;
    const int64_t begin = runs_.front().whole;
    if (runs_.size() == 1) {
      source_.read(path_, begin, destination_.narrow(0, runs_.front().to, runs_.front().length));
    } else {
      const at::Tensor window = at::empty({runs_.back().whole + runs_.back().length - begin}, destination_.options());
      source_.read(path_, begin, window);
      const auto* from = static_cast<const char*>(window.const_data_ptr());
      auto* to = static_cast<char*>(destination_.mutable_data_ptr());
      for (const Run& run : runs_) {
        std::memcpy(to + run.to * element_, from + (run.whole - begin) * element_, run.length * element_);
      }
    }
    runs_.clear();
  }

 private:
  struct Run {
    int64_t whole;
    int64_t to;
    int64_t length;
  };
  Source& source_;
  const std::string& path_;
  const at::Tensor& destination_;  // flat
  size_t element_;
  int64_t most_;  // elements of a window
  std::vector<Run> runs_;
};

}  // namespace

void read_part(Source& source, const std::string& path, const TensorPart& part, int64_t offset,
               const at::Tensor& destination) {
  const std::vector<int64_t>& sizes = source.info(path).sizes;
  const int64_t end = offset + destination.numel();
  require(part.whole_sizes() == sizes, source.location(), ": \"", path, "\": expected a part of a tensor of shape ",
          at::IntArrayRef(sizes), ", found one of ", at::IntArrayRef(part.whole_sizes()));
  require(destination.is_cpu() && destination.is_contiguous() && offset >= 0 && end <= part.numel(), source.location(),
          ": \"", path, "\": elements ", offset, " to ", end, " of a part of ", part.numel(), " into ",
          describe(destination));
  if (offset == end) return;
  const at::Tensor flat = destination.view({-1});
  if (auto* reader = dynamic_cast<PartReader*>(&source)) return reader->read_own_part(path, part, offset, flat);
  Windows windows(source, path, flat);
  PartRuns(part).in_part(offset, end,
                         [&](int64_t whole, int64_t at, int64_t length) { windows.add(whole, at - offset, length); });
  windows.read();
}

}  // namespace ds::checkpoint
