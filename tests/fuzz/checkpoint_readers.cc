#include "tests/fuzz/checkpoint_readers.h"

#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/pickle/pickle_reader.h"
#include "checkpoint/pickle/torch_archive.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/text.h"
#include "core/unique_fd.h"
#include "dsengine/checkpoint.h"
#include "dsengine/exported_model.h"
#include "exported/archive.h"
#include "tests/fuzz/refusing.h"

namespace ds::fuzz {
namespace {

// Tensors may repeat their elements, so that a small file has some megabytes of them.
constexpr int64_t kMostBytes = 8 << 20;

// A file in memory, with a name for as long as it lives.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : file_(memfd_create("fuzz", MFD_CLOEXEC)) {
    ensure(file_.valid() && write(file_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
           "a file in memory");
  }
  std::string path() const { return cat("/proc/self/fd/", file_.get()); }

 private:
  UniqueFd file_;
};

// Every byte is looked at, for the address sanitizer to see.
void look_at(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(values.const_data_ptr());
  volatile uint8_t sum = 0;
  for (size_t i = 0; i < values.nbytes(); ++i) sum = sum + bytes[i];
}

// Values may contain one another in circles.
void look_at(const checkpoint::PickleValue& value, const checkpoint::TorchArchive* archive, int& budget) {
  if (--budget < 0) return;
  static_cast<void>(value.in_words());
  if (value.is(checkpoint::PickleKind::kTensor) && archive != nullptr) {
    refusing([&] {
      archive->check(*value.tensor);
      const auto element = static_cast<int64_t>(c10::elementSize(value.tensor->dtype));
      if (value.tensor->numel() <= kMostBytes / element) look_at(archive->tensor(*value.tensor));
    });
  }
  for (const checkpoint::PickleValue* item : value.items) look_at(*item, archive, budget);
  for (const auto& [key, content] : value.entries) look_at(*content, archive, budget);
  if (value.state != nullptr) look_at(*value.state, archive, budget);
}

constexpr int kMostValues = 1000;

}  // namespace

void read_safetensors(std::string_view bytes) {
  const MemoryFile memory(bytes);
  refusing([&] {
    const SafetensorsFile file(memory.path());
    for (const SafetensorsFile::Entry& entry : file.entries()) look_at(file.tensor(entry.name));
  });
}

void read_pickle(std::string_view bytes) {
  refusing([&] {
    const checkpoint::Pickle pickle({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "input");
    int budget = kMostValues;
    look_at(pickle.root(), nullptr, budget);
    static_cast<void>(checkpoint::plain_json(pickle.root()));
  });
}

void read_archive(std::string_view bytes) {
  const MemoryFile memory(bytes);
  for (const auto contents : {checkpoint::ArchiveContents::kValues, checkpoint::ArchiveContents::kModules}) {
    refusing([&] {
      const checkpoint::TorchArchive archive(memory.path(), contents);
      int budget = kMostValues;
      look_at(archive.root(), &archive, budget);
    });
  }
  refusing([&] {
    const auto source = checkpoint::open_weights(memory.path());
    for (const auto& [path, info] : source->tensors()) {
      if (info.numel() <= kMostBytes / 8) look_at(source->tensor(path));
    }
  });
}

void read_exported(std::string_view bytes) {
  const MemoryFile memory(bytes);
  refusing([&] {
    const exported::Archive archive(memory.path());
    for (const std::string& program : archive.programs()) {
      for (const exported::StoredTensors& tensors : {archive.weights(program), archive.constants(program)}) {
        for (const auto& [name, stored] : tensors) {
          if (stored.numel() > kMostBytes / 16) return;
        }
      }
      const auto module = load_exported(memory.path(), {.program = program, .unused_inputs = true});
      for (const at::Tensor& parameter : module->parameters()) look_at(parameter);
    }
  });
}

void read_index(std::string_view bytes) {
  refusing([&] { static_cast<void>(checkpoint::index_from(std::string(bytes), "input")); });
  // A checksum is no secret: whoever changes the content can set it right.
  const nlohmann::json value = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object() || !value.contains("content")) return;
  std::string sealed;
  try {
    sealed = checkpoint::sealed(value["content"]);
  } catch (const nlohmann::json::exception&) {
    return;  // text that is no UTF-8
  }
  refusing([&] {
    const checkpoint::Index index = checkpoint::index_from(sealed, "input");
    const std::string again = checkpoint::to_text(index);
    ensure(checkpoint::to_text(checkpoint::index_from(again, "again")) == again,
           "an index that was read can be written");
  });
}

void read_weights_index(std::string_view bytes) {
  static const std::string folder = [] {
    std::string pattern = (std::filesystem::temp_directory_path() / "ds_fuzz_XXXXXX").string();
    ensure(mkdtemp(pattern.data()) != nullptr, "a folder for the index");
    write_safetensors(pattern + "/model-00001-of-00001.safetensors", {{"a", at::zeros({3})}, {"b", at::zeros({2, 2})}});
    return pattern;
  }();
  const std::string index = folder + "/model.safetensors.index.json";
  std::ofstream(index, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  refusing([&] {
    const auto source = checkpoint::open_weights(folder);
    ensure(source->tensors().size() == 2, "an index that fits names both tensors");
  });
}

}  // namespace ds::fuzz
