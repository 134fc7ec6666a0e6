// An exported model with other weights: the same file, whose records of weights are replaced in place.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/crc32.h"
#include "core/files/atomic_file.h"
#include "core/files/stored_zip.h"
#include "core/listed.h"
#include "core/shown_text.h"
#include "dsengine/exported_model.h"
#include "exported/archive.h"

namespace ds {
namespace exported {
namespace {

struct NewValue {
  std::string name;
  StoredTensor stored;
  at::Tensor value;  // on the CPU, of the stored dtype
};

// The new values of each record.
using NewRecords = std::map<std::string, std::vector<NewValue>>;

NewRecords new_records(const Archive& archive, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::string& program) {
  if (!program.empty()) archive.require_program(program);
  // Several programs of one file each have their own tensor of a name.
  std::map<std::string, std::vector<StoredTensor>> weights;
  for (const std::string& one : archive.programs()) {
    if (!program.empty() && one != program) continue;
    for (const auto& [name, stored] : archive.weights(one)) weights[name].push_back(stored);
  }
  std::vector<std::string> names;
  for (const auto& [name, stored] : weights) names.push_back(name);
  NewRecords records;
  for (const auto& [name, value] : tensors) {
    const auto found = weights.find(name);
    require<UsageError>(found != weights.end(), "save_exported: \"", shown_text(name),
                        "\" is no parameter or persistent buffer of ", archive.path(), "; it has ", listed(names, 10));
    for (const StoredTensor& stored : found->second) {
      require<UsageError>(value.defined() && value.sizes() == at::IntArrayRef(stored.sizes), "save_exported: \"",
                          shown_text(name), "\" is ", value.defined() ? cat(value.sizes()) : "no tensor", "; ",
                          archive.path(), " has ", at::IntArrayRef(stored.sizes),
                          ": give the full tensor, as Engine::module_state_dict() returns it");
      require<UsageError>(value.is_floating_point() == c10::isFloatingType(stored.dtype), "save_exported: \"",
                          shown_text(name), "\" is ", value.scalar_type(), "; ", archive.path(), " has ", stored.dtype,
                          ": give a tensor of the same kind");
      records[stored.record].push_back({name, stored, value.detach().to(at::kCPU, stored.dtype)});
    }
  }
  return records;
}

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.contiguous().view({-1}).view(at::kByte); }

// Returns the bytes of the record with the new values in their places.
std::vector<uint8_t> replaced(const Archive& archive, const std::string& record, const std::vector<NewValue>& values) {
  const auto old = archive.zip().record(archive.folder() + record);
  std::vector<uint8_t> bytes(old.begin(), old.end());
  const auto place_of = [&bytes](const StoredTensor& stored) {
    const auto numel = static_cast<int64_t>(bytes.size() / c10::elementSize(stored.dtype));
    return at::from_blob(bytes.data(), {numel}, stored.dtype).as_strided(stored.sizes, stored.strides, stored.offset);
  };
  for (const NewValue& value : values) {
    if (value.stored.numel() > 0) place_of(value.stored).copy_(value.value);
  }
  // Tied parameters, and views of one storage: what was written first must still be there.
  for (const NewValue& value : values) {
    if (value.stored.numel() == 0 || bytes_of(place_of(value.stored)).equal(bytes_of(value.value))) continue;
    std::vector<std::string> names;
    for (const NewValue& other : values) names.push_back(other.name);
    throw UsageError(cat("save_exported: ", listed(names, 10), " share memory in ", archive.path(),
                         " and have different values; give one value, or one of the names alone"));
  }
  return bytes;
}

}  // namespace
}  // namespace exported

void save_exported(const std::string& path, const std::string& exported,
                   const std::vector<std::pair<std::string, at::Tensor>>& tensors, const std::string& program) {
  const exported::Archive archive(exported);
  const StoredZip& file = archive.zip();
  const exported::NewRecords records = exported::new_records(archive, tensors, program);
  AtomicFile output(path);
  output.write(file.bytes().data(), file.bytes().size());
  for (const auto& [record, values] : records) {
    const std::vector<uint8_t> bytes = exported::replaced(archive, record, values);
    const std::string name = archive.folder() + record;
    output.write_at(file.position(name), bytes.data(), bytes.size());
    const uint32_t checksum = crc32<Crc32Polynomial::kIeee>(bytes);
    for (const uint64_t at : file.checksum_positions(name)) output.write_at(at, &checksum, sizeof(checksum));
  }
  output.commit();
}

}  // namespace ds
