#include "engine/report/batch_tape.h"

#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/parity/parity_names.h"
#include "core/text.h"

namespace ds::engine {
namespace {

bool is_file(const std::string& path) {
  std::error_code none;
  return std::filesystem::is_regular_file(path, none);
}

}  // namespace

std::string BatchTape::path(const TapePlace& place, const char* what, int64_t index) const {
  return parity_path(folder_, parity_batch_file(place.data_rank, place.micro_batch, cat(what, '_', index)));
}

at::Tensor BatchTape::read(const std::string& path) {
  ++count_;
  return SafetensorsFile(path).tensor(kParityBatchTensor).clone();
}

void BatchTape::write(const at::Tensor& tensor, const std::string& path) {
  require(safetensors_holds(tensor.scalar_type()), "parity: ", path,
          ": expected a dtype that a safetensors file holds, ", "found ", tensor.scalar_type(), "; leave out --replay");
  ++count_;
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  SafetensorsWriter file(path,
                         {{.name = kParityBatchTensor, .dtype = values.scalar_type(), .sizes = values.sizes().vec()}});
  file.write(kParityBatchTensor, values);
  file.commit(/*durable=*/false);
}

at::Tensor BatchTape::take(const at::Tensor& tensor, const TapePlace& place, int64_t index) {
  const std::string file = path(place, "forward", index);
  if (!use_.reads) {
    if (use_.writes_inputs) write(tensor, file);
    return tensor;
  }
  require(is_file(file), "parity: micro-batch ", place.micro_batch, " of rank ", place.data_rank, ": expected that ",
          "forward() is given the tensors of the first run, which has written ", index,
          " of them down, found one more: ",
          "what the program gives to it depends on the number of ranks; leave out --replay");
  return read(file);
}

pipeline::MicroBatch BatchTape::take(const pipeline::BatchSource& next, const TapePlace& place) {
  if (use_.reads) return read_batch(place);
  pipeline::MicroBatch batch = next();
  const auto write_all = [&](const pipeline::Tensors& tensors, const char* what) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined()) write(tensors[i], path(place, what, static_cast<int64_t>(i)));
    }
  };
  if (use_.writes_inputs) write_all(batch.inputs, "input");
  if (use_.writes_labels) write_all(batch.labels, "label");
  return batch;
}

pipeline::MicroBatch BatchTape::read_batch(const TapePlace& place) {
  pipeline::MicroBatch batch;
  const auto read_all = [&](const char* what) {
    pipeline::Tensors tensors;
    for (int64_t i = 0; is_file(path(place, what, i)); ++i) tensors.push_back(read(path(place, what, i)));
    return tensors;
  };
  batch.inputs = read_all("input");
  batch.labels = read_all("label");
  require(!batch.inputs.empty() || !batch.labels.empty(), "parity: micro-batch ", place.micro_batch, " of rank ",
          place.data_rank, ": expected one that the first run has written down, found none: the program takes more ",
          "micro-batches than that run has had");
  return batch;
}

}  // namespace ds::engine
