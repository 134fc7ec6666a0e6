// The file of torch.export.save (.pt2): the program as JSON, and stored tensors. Nothing in it is run, and its pickles
// (example inputs, script objects) are not read.
//
// A zip file of stored records in one folder: archive_format ("pt2"), archive_version, byteorder, models/NAME.json,
// data/weights/NAME_weights_config.json and data/constants/NAME_constants_config.json, which say for each name in which
// record its storage lies, at which offset and with which strides. torch 2.9 and newer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/files/stored_zip.h"
#include "core/text.h"
#include "dsengine/errors.h"

namespace ds::exported {

// The enumerations of torch/_export/serde/schema.py, whose numbers are not c10's. Each throws IoError for a number that
// is not known, saying which are.
at::ScalarType scalar_type_of(int64_t number);
at::Layout layout_of(int64_t number);
at::MemoryFormat memory_format_of(int64_t number);

// The end of a message about a file that no writer has made.
inline constexpr const char* kDamaged = "; the file is damaged, export the model again";

// A parameter, buffer or constant in the file. Counts are in elements.
struct StoredTensor {
  std::string record;  // of the archive; two names of one storage have one record
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  std::string device_type;  // of the export: "cpu", "cuda"
  bool is_parameter = false;
  bool requires_grad = false;

  int64_t numel() const;
  // The place of its elements in the file. Tensors that have one place are one tensor: a tied parameter.
  auto place() const { return std::tie(record, offset, dtype, sizes, strides); }
};

// Orders tensors by their places in the file.
struct ByPlace {
  bool operator()(const StoredTensor& a, const StoredTensor& b) const { return a.place() < b.place(); }
};

using StoredTensors = std::map<std::string, StoredTensor>;

// Returns the names whose tensor has an earlier name too, each with the first name of that tensor.
std::map<std::string, std::string> tied_names(const StoredTensors& tensors);

// Whether the file is one of torch.export.save, by its name (".pt2") or the record in it.
bool is_exported_file(const std::string& path);

// The opened file. Maps it. Safe for concurrent readers.
class Archive {
 public:
  // Throws IoError naming the path and what to do in Python: no such file, damaged, a compiled library, written by
  // torch 2.8 or older.
  explicit Archive(const std::string& path);

  const std::string& path() const { return zip_.path(); }
  // The names of its programs, sorted.
  const std::vector<std::string>& programs() const { return programs_; }
  // Throws IoError naming the programs that are there, where `name` is none of them.
  void require_program(const std::string& name) const;
  // The JSON of a program, with what exported/program_json.h keeps of it. Throws IoError: none of that name, damaged,
  // another major version of the schema.
  nlohmann::json program(const std::string& name) const;
  // Parameters and persistent buffers of a program by name; constants and non-persistent buffers. Throw IoError:
  // damaged, a tensor that does not lie inside its record, one of a subclass or that is not strided.
  StoredTensors weights(const std::string& program) const;
  StoredTensors constants(const std::string& program) const;

  // Reads elements [offset, offset + destination.numel()) of the flattened tensor into `destination`, which is
  // contiguous, on the CPU and may have any dtype (values are converted).
  void read(const StoredTensor& tensor, int64_t offset, const at::Tensor& destination) const;
  // Returns the tensor in memory of its own, on the CPU; `meta`: on the meta device, without values.
  at::Tensor make(const StoredTensor& tensor, bool meta) const;

  // The records, for whoever writes the file again, and the folder that all of them are in, with its slash. Names of
  // records are without it ("models/model.json") wherever else this class has them.
  const StoredZip& zip() const { return zip_; }
  const std::string& folder() const { return folder_; }

  // Throws IoError that begins with the path.
  template <class... Parts>
  void require_good(bool condition, const Parts&... parts) const {
    if (!condition) fail(cat(parts...));
  }
  [[noreturn]] void fail(const std::string& what) const;
  // Returns what `read` makes of the JSON of a program. Where that is not what the schema says, and for each IoError of
  // `read`, throws an IoError that begins with the path.
  template <class Read>
  auto reading(const std::string& program, const Read& read) const {
    try {
      return read();
    } catch (const nlohmann::json::exception& error) {
      fail_in_program(program, error);
    } catch (const IoError& error) {
      if (std::string_view(error.what()).starts_with(path())) throw;
      fail(error.what());
    }
  }

 private:
  [[noreturn]] void fail_in_program(const std::string& program, const nlohmann::json::exception& error) const;
  std::span<const uint8_t> record(const std::string& name) const { return zip_.record(folder_ + name); }
  std::string text(const std::string& name) const;
  using Parser = std::function<nlohmann::json(const std::string& text)>;
  nlohmann::json json(const std::string& name, const Parser& parser) const;
  StoredTensors tensors(const std::string& program, const char* kind) const;
  StoredTensor tensor(const std::string& name, const nlohmann::json& config, const std::string& folder) const;
  // All elements of the storage, a view of the mapping (or a copy where the file has them unaligned).
  at::Tensor storage(const StoredTensor& tensor) const;

  StoredZip zip_;
  std::string folder_;
  std::vector<std::string> programs_;
};

}  // namespace ds::exported
