#include "offload/tensor_file.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/round_up.h"

namespace ds::offload {

int64_t TensorFile::memory_bytes(int64_t size) { return round_up(size, AioFile::alignment()); }

int64_t TensorFile::file_bytes(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += memory_bytes(size);
  return total;
}

TensorFile::TensorFile(std::unique_ptr<AioFile> file, const std::vector<int64_t>& sizes) : file_(std::move(file)) {
  require(file_->bytes() >= file_bytes(sizes), file_->path(),
          ": expected a file of TensorFile::file_bytes(sizes) = ", file_bytes(sizes), " bytes, found ", file_->bytes());
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    parts_.push_back({offset, size});
    offset += memory_bytes(size);
  }
}

void TensorFile::require_fits(int64_t index, const at::Tensor& tensor) const {
  require(index >= 0 && index < static_cast<int64_t>(parts_.size()), file_->path(), ": expected a tensor from 0 to ",
          parts_.size() - 1, ", found ", index);
  const int64_t bytes = parts_[index].bytes;
  require(tensor.defined() && tensor.device().is_cpu() && tensor.dim() == 1 && tensor.is_contiguous() &&
              static_cast<int64_t>(tensor.nbytes()) == bytes,
          file_->path(), ": tensor ", index, ": expected a flat, contiguous tensor of ", bytes,
          " bytes on the CPU, found ", lazy([&] {
            return tensor.defined() ? cat(tensor.nbytes(), " bytes of shape ", tensor.sizes(), " on ", tensor.device())
                                    : "none";
          }));
  const auto room = static_cast<int64_t>(tensor.storage().nbytes()) - tensor.storage_offset() * tensor.element_size();
  require(room >= memory_bytes(bytes), file_->path(), ": tensor ", index, ": expected a storage with ",
          memory_bytes(bytes), " bytes from the tensor's first element on, found ", room,
          "; make it TensorFile::memory_bytes() long");
}

AioFile::Ticket TensorFile::start_read(int64_t index, const at::Tensor& into) {
  require_fits(index, into);
  const Part& part = parts_[index];
  const auto ticket = file_->read(part.offset, into.data_ptr(), memory_bytes(part.bytes));
  under_way_.emplace_back(ticket, into);
  return ticket;
}

AioFile::Ticket TensorFile::start_write(int64_t index, const at::Tensor& from) {
  require_fits(index, from);
  const Part& part = parts_[index];
  const auto ticket = file_->write(part.offset, from.data_ptr(), memory_bytes(part.bytes));
  under_way_.emplace_back(ticket, from);
  return ticket;
}

void TensorFile::wait(AioFile::Ticket ticket) {
  const auto found =
      std::find_if(under_way_.begin(), under_way_.end(), [&](const auto& entry) { return entry.first == ticket; });
  at::Tensor kept;
  if (found != under_way_.end()) {
    kept = std::move(found->second);
    under_way_.erase(found);
  }
  file_->wait(ticket);
}

}  // namespace ds::offload
