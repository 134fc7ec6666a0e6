#include "checkpoint/deepspeed/stored_tensors.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace ds::checkpoint {

void StoredRun::add(int64_t stored, int64_t numel) {
  stored_.push_back(stored);
  ends_.push_back(this->numel() + numel);
}

void StoredRun::append_ranges(int64_t begin, int64_t numel, std::vector<StoredRange>& ranges) const {
  ensure(begin >= 0 && numel >= 0 && begin + numel <= this->numel(), "a range lies inside its run");
  const int64_t end = begin + numel;
  for (auto it = std::upper_bound(ends_.begin(), ends_.end(), begin); begin < end; ++it) {
    const auto part = static_cast<size_t>(it - ends_.begin());
    const int64_t part_begin = part == 0 ? 0 : ends_[part - 1];
    const int64_t taken = std::min(end, ends_[part]) - begin;
    if (taken > 0) ranges.push_back({.stored = stored_[part], .begin = begin - part_begin, .numel = taken});
    begin += taken;
  }
}

int64_t StoredTensors::add(std::shared_ptr<const TorchArchive> archive, const TensorReference& tensor) {
  archive->check(tensor);
  stored_.push_back({.archive = std::move(archive), .tensor = tensor});
  return static_cast<int64_t>(stored_.size()) - 1;
}

void StoredTensors::define(const std::string& location, const std::string& path, TensorInfo info,
                           std::vector<StoredRange> ranges) {
  const int64_t covered = std::accumulate(ranges.begin(), ranges.end(), int64_t{0},
                                          [](int64_t sum, const StoredRange& range) { return sum + range.numel; });
  ensure(covered == info.numel(), "ranges cover their tensor");
  require<IoError>(infos_.emplace(path, std::move(info)).second, location, ": tensor \"", path, "\" is there twice");
  ranges_.emplace(path, std::move(ranges));
}

void StoredTensors::define_whole(const std::string& location, const std::string& path, int64_t stored, bool frozen) {
  const TensorReference& tensor = stored_.at(static_cast<size_t>(stored)).tensor;
  define(location, path, {.dtype = tensor.dtype, .sizes = tensor.sizes, .frozen = frozen},
         {{.stored = stored, .begin = 0, .numel = tensor.numel()}});
}

void StoredTensors::read(const std::string& path, int64_t offset, const at::Tensor& destination) const {
  const at::Tensor flat = destination.detach().view({-1});
  const int64_t end = offset + flat.numel();
  int64_t range_begin = 0;
  for (const StoredRange& range : ranges_.at(path)) {
    const int64_t begin = std::max(offset, range_begin);
    const int64_t taken = std::min(end, range_begin + range.numel) - begin;
    if (taken > 0) {
      const Stored& source = stored_[static_cast<size_t>(range.stored)];
      source.archive->read(source.tensor, range.begin + begin - range_begin, flat.narrow(0, begin - offset, taken));
    }
    range_begin += range.numel;
  }
}

}  // namespace ds::checkpoint
