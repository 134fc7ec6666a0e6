#include "checkpoint/pickle/torch_archive.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <cstring>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

constexpr const char* kPickle = "/data.pkl";

}  // namespace

TorchArchive::TorchArchive(const std::string& path, ArchiveContents contents) : zip_(path) {
  const std::string pickle = zip_.name_ending(kPickle);
  require<IoError>(!pickle.empty(), path, ": a zip file without data.pkl; expected a file of torch.save");
  folder_ = pickle.substr(0, pickle.size() - std::string(kPickle).size() + 1);
  require<IoError>(contents == ArchiveContents::kModules || !zip_.contains(cat(folder_, "constants.pkl")), path,
                   ": a TorchScript module; expected a file of torch.save");
  if (const std::string order = cat(folder_, "byteorder"); zip_.contains(order)) {
    const auto text = zip_.record(order);
    const std::string written(reinterpret_cast<const char*>(text.data()), text.size());
    require<IoError>(written == "little", path, ": written with byte order \"", written, "\", expected \"little\"");
  }
  zip_.check_sum(pickle);
  pickle_ = std::make_unique<Pickle>(zip_.record(pickle), path);
}

const PickleValue& TorchArchive::root() const {
  require(pickle_ != nullptr, path(), ": its values were given up by forget()");
  return pickle_->root();
}

std::string TorchArchive::record_name(const TensorReference& tensor) const {
  return cat(folder_, "data/", tensor.storage);
}

void TorchArchive::check(const TensorReference& tensor) const {
  const std::string name = record_name(tensor);
  require<IoError>(
      tensor.dtype != at::ScalarType::Undefined, path(), ": record \"", name, "\" is a ", tensor.storage_type,
      "; dtypes float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8", " and bool can be read");
  const size_t bytes = zip_.record(name).size();
  const size_t element = c10::elementSize(tensor.dtype);
  require<IoError>(static_cast<uint64_t>(tensor.storage_numel) <= bytes / element, path(), ": record \"", name,
                   "\" has ", bytes, " bytes, expected ", tensor.storage_numel, " elements of ", element);
}

at::Tensor TorchArchive::stored(const TensorReference& tensor, int64_t offset, int64_t numel) const {
  check(tensor);
  const auto record = zip_.record(record_name(tensor));
  const size_t element = c10::elementSize(tensor.dtype);
  const uint8_t* begin = record.data() + static_cast<size_t>(offset) * element;
  if (numel == 0) return at::empty({0}, tensor.dtype);
  if (reinterpret_cast<uintptr_t>(begin) % element == 0) {
    return at::from_blob(const_cast<uint8_t*>(begin), {numel}, tensor.dtype);
  }
  at::Tensor copy = at::empty({numel}, tensor.dtype);
  std::memcpy(copy.data_ptr(), begin, static_cast<size_t>(numel) * element);
  return copy;
}

void TorchArchive::read(const TensorReference& tensor, int64_t offset, const at::Tensor& destination) const {
  const int64_t numel = destination.numel();
  require(destination.is_contiguous() && destination.device().is_cpu(), "destination: expected contiguous, on the CPU");
  require(offset >= 0 && numel <= tensor.numel() - offset, path(), ": elements ", offset, " to ", offset + numel,
          " of a tensor of ", tensor.numel());
  if (numel == 0) return;
  at::Tensor target = destination.detach().view({-1});
  if (tensor.contiguous()) {
    target.copy_(stored(tensor, tensor.offset + offset, numel));
    return;
  }
  const at::Tensor storage = stored(tensor, tensor.offset, tensor.storage_numel - tensor.offset);
  target.copy_(storage.as_strided(tensor.sizes, tensor.strides).reshape({-1}).narrow(0, offset, numel));
}

at::Tensor TorchArchive::tensor(const TensorReference& tensor) const {
  check(tensor);
  at::Tensor result = at::empty(tensor.sizes, tensor.dtype);
  read(tensor, 0, result);
  return result;
}

}  // namespace ds::checkpoint
