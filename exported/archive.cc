#include "exported/archive.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/json/json_depth.h"
#include "core/json/parse_json.h"
#include "core/listed.h"
#include "core/shown_text.h"
#include "exported/program_json.h"

namespace ds::exported {
namespace {

constexpr const char* kSave = "torch.export.save(torch.export.export(model, inputs), \"model.pt2\")";
constexpr std::string_view kFormat = "archive_format";
constexpr std::string_view kModels = "models/";
constexpr std::string_view kJson = ".json";
// Major version of the schema that is read; minor versions only add.
constexpr int64_t kSchemaMajor = 8;

std::vector<int64_t> fixed_sizes(const nlohmann::json& from) {
  std::vector<int64_t> result;
  for (const nlohmann::json& size : from) result.push_back(size.at("as_int").get<int64_t>());
  return result;
}

// The number of elements of a storage that the tensor needs; -1: no storage has so many.
int64_t needed_elements(const StoredTensor& tensor) {
  auto last = static_cast<uint64_t>(tensor.offset);
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    uint64_t step = 0;
    if (tensor.sizes[i] == 0) return 0;
    if (c10::mul_overflows(static_cast<uint64_t>(tensor.sizes[i] - 1), static_cast<uint64_t>(tensor.strides[i]),
                           &step) ||
        c10::add_overflows(last, step, &last)) {
      return -1;
    }
  }
  return last < INT64_MAX ? static_cast<int64_t>(last) + 1 : -1;
}

bool is_row_major(const StoredTensor& tensor) {
  int64_t step = 1;
  for (size_t i = tensor.sizes.size(); i-- > 0;) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != step) return false;
    step *= tensor.sizes[i];
  }
  return true;
}

}  // namespace

at::ScalarType scalar_type_of(int64_t number) {
  static const std::map<int64_t, at::ScalarType> kTypes = {{1, at::kByte},
                                                           {2, at::kChar},
                                                           {3, at::kShort},
                                                           {4, at::kInt},
                                                           {5, at::kLong},
                                                           {6, at::kHalf},
                                                           {7, at::kFloat},
                                                           {8, at::kDouble},
                                                           {9, at::kComplexHalf},
                                                           {10, at::kComplexFloat},
                                                           {11, at::kComplexDouble},
                                                           {12, at::kBool},
                                                           {13, at::kBFloat16},
                                                           {28, at::kUInt16},
                                                           {29, at::kFloat8_e4m3fn},
                                                           {30, at::kFloat8_e5m2},
                                                           {31, at::kFloat8_e4m3fnuz},
                                                           {32, at::kFloat8_e5m2fnuz},
                                                           {34, at::kUInt32},
                                                           {35, at::kUInt64}};
  const auto found = kTypes.find(number);
  require<IoError>(found != kTypes.end(), "dtype ", number,
                   " of the schema is not known; expected 1 to 13 or 28 to 35");
  return found->second;
}

at::Layout layout_of(int64_t number) {
  constexpr int64_t kStrided = 7;
  require<IoError>(number == kStrided, "layout ", number, " of the schema: only strided tensors (", kStrided,
                   ") can be trained; make the tensor dense in Python (to_dense())");
  return at::kStrided;
}

at::MemoryFormat memory_format_of(int64_t number) {
  switch (number) {
    case 1:
      return at::MemoryFormat::Contiguous;
    case 2:
      return at::MemoryFormat::ChannelsLast;
    case 3:
      return at::MemoryFormat::ChannelsLast3d;
    case 4:
      return at::MemoryFormat::Preserve;
    default:
      throw IoError(cat("memory format ", number, " of the schema is not known; expected 1 to 4"));
  }
}

int64_t StoredTensor::numel() const {
  int64_t result = 1;
  for (const int64_t size : sizes) result *= size;
  return result;
}

std::map<std::string, std::string> tied_names(const StoredTensors& tensors) {
  std::map<StoredTensor, std::string, ByPlace> first;
  std::map<std::string, std::string> tied;
  for (const auto& [name, stored] : tensors) {
    const auto [found, is_new] = first.try_emplace(stored, name);
    if (!is_new) tied.emplace(name, found->second);
  }
  return tied;
}

bool is_exported_file(const std::string& path) {
  if (path.ends_with(".pt2")) return true;
  try {
    return !StoredZip(path).name_ending(cat("/", kFormat)).empty();
  } catch (const IoError&) {
    return false;  // whoever reads it as another format says what is wrong
  }
}

Archive::Archive(const std::string& path) : zip_(path) {
  const std::string format = zip_.name_ending(cat("/", kFormat));
  if (format.empty()) {
    require_good(zip_.name_ending("serialized_exported_program.json").empty(),
                 "written by torch 2.7 or older; export the model again with torch 2.9 or newer");
    fail(cat("no exported model (it has no record \"", kFormat, "\"); write it in Python by ", kSave));
  }
  folder_ = format.substr(0, format.size() - kFormat.size());
  require_good(text(std::string(kFormat)) == "pt2", "its format is \"", shown_text(text(std::string(kFormat))),
               "\", expected \"pt2\"; write it in Python by ", kSave);
  if (zip_.contains(folder_ + "byteorder")) {
    require_good(text("byteorder") == "little", "written with byte order \"", shown_text(text("byteorder")),
                 "\", expected \"little\"");
  }
  const std::string models = cat(folder_, kModels);
  for (const std::string& name : zip_.names()) {
    if (!name.starts_with(models) || !name.ends_with(kJson)) continue;
    programs_.push_back(name.substr(models.size(), name.size() - models.size() - kJson.size()));
  }
  require_good(!programs_.empty(),
               "holds no program, as a package of AOTInductor, which has a compiled library alone; "
               "write the model in Python by ",
               kSave);
}

void Archive::fail(const std::string& what) const { throw IoError(cat(path(), ": ", what)); }

void Archive::fail_in_program(const std::string& program, const nlohmann::json::exception& error) const {
  fail(cat("the program \"", program, "\": ", shown_text(error.what()), kDamaged));
}

std::string Archive::text(const std::string& name) const {
  const auto bytes = record(name);
  zip_.check_sum(folder_ + name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

nlohmann::json Archive::json(const std::string& name, const Parser& parser) const {
  const std::string content = text(name);
  try {
    require_good(!is_deep_json(content), "\"", name, "\" has values more than ", kDeepestJson, " levels deep");
    auto result = parser(content);
    require_good(result.is_object(), "\"", name, "\" is no object of JSON", kDamaged);
    return result;
  } catch (const nlohmann::json::exception& error) {
    fail(cat("\"", name, "\": ", shown_text(error.what()), kDamaged));
  }
}

void Archive::require_program(const std::string& name) const {
  require_good(std::find(programs_.begin(), programs_.end(), name) != programs_.end(), "no program \"",
               shown_text(name), "\"; it has ", listed(programs_, 10), " (ExportedOptions::program)");
}

nlohmann::json Archive::program(const std::string& name) const {
  require_program(name);
  nlohmann::json program = json(cat(kModels, name, kJson), parse_program);
  const nlohmann::json* const version = program.contains("schema_version") ? &program["schema_version"] : nullptr;
  require_good(version != nullptr && version->is_object() && version->contains("major") &&
                   version->at("major").is_number_integer(),
               "the program \"", name, "\" has no version of its schema; export the model again");
  const auto major = version->at("major").get<int64_t>();
  require_good(major == kSchemaMajor, "schema ", major, ".", version->value("minor", int64_t{0}), ", written by torch ",
               shown_text(program.value("torch_version", std::string("of an unknown version"))), "; expected a schema ",
               kSchemaMajor, ".x: export the model with a torch from 2.9 on that has it");
  return program;
}

StoredTensors Archive::weights(const std::string& program) const { return tensors(program, "weights"); }
StoredTensors Archive::constants(const std::string& program) const { return tensors(program, "constants"); }

StoredTensors Archive::tensors(const std::string& program, const char* kind) const {
  const std::string folder = cat("data/", kind, "/");
  const std::string name = cat(folder, program, "_", kind, "_config.json");
  if (!zip_.contains(folder_ + name)) {
    require_good(
        !zip_.contains(cat(folder_, folder, program, ".pt")), "its ", kind,
        " are one file of torch.save, as torch 2.8 writes them; export the model again with torch 2.9 or newer");
    return {};
  }
  const nlohmann::json config = json(name, [](const std::string& text) { return parse_json<nlohmann::json>(text); });
  StoredTensors result;
  std::string at;
  try {
    for (const auto& [fqn, entry] : config.at("config").items()) {
      at = fqn;
      // Constants may be script objects, which no program that is read here has as an input.
      if (entry.at("use_pickle").get<bool>() && entry.value("tensor_meta", nlohmann::json()).is_null()) continue;
      result.emplace(fqn, tensor(fqn, entry, folder));
    }
  } catch (const nlohmann::json::exception& error) {
    fail(cat("\"", name, "\", \"", shown_text(at), "\": ", shown_text(error.what()), kDamaged));
  }
  return result;
}

StoredTensor Archive::tensor(const std::string& name, const nlohmann::json& config, const std::string& folder) const {
  const nlohmann::json& meta = config.at("tensor_meta");
  const auto check = [&](bool condition, const auto&... parts) {
    require_good(condition, "tensor \"", lazy([&] { return shown_text(name); }), "\" ", parts...);
  };
  check(!config.at("use_pickle").get<bool>(),
        "is of a tensor subclass, which is stored as a pickle; make it a plain "
        "tensor before the export");
  StoredTensor result{.record = folder + config.at("path_name").get_ref<const std::string&>(),
                      .sizes = fixed_sizes(meta.at("sizes")),
                      .strides = fixed_sizes(meta.at("strides")),
                      .offset = meta.at("storage_offset").at("as_int").get<int64_t>(),
                      .device_type = meta.at("device").at("type").get<std::string>(),
                      .is_parameter = config.at("is_param").get<bool>(),
                      .requires_grad = meta.at("requires_grad").get<bool>()};
  try {
    result.dtype = scalar_type_of(meta.at("dtype").get<int64_t>());
    layout_of(meta.at("layout").get<int64_t>());
  } catch (const IoError& error) {
    check(false, "cannot be read: ", error.what());
  }
  const auto negative = [](int64_t number) { return number < 0; };
  check(result.sizes.size() == result.strides.size() && result.offset >= 0 &&
            std::none_of(result.sizes.begin(), result.sizes.end(), negative) &&
            std::none_of(result.strides.begin(), result.strides.end(), negative),
        "has sizes ", lazy([&] { return listed(result.sizes, 8); }), ", strides ",
        lazy([&] { return listed(result.strides, 8); }), " and offset ", result.offset, kDamaged);
  const auto shown_record = lazy([&] { return shown_text(result.record); });
  check(zip_.contains(folder_ + result.record), "lies in the record \"", shown_record,
        "\", which the file does not have", kDamaged);
  const size_t stored = record(result.record).size() / c10::elementSize(result.dtype);
  const int64_t needed = needed_elements(result);
  check(needed >= 0 && static_cast<uint64_t>(needed) <= stored, "needs ", needed, " elements of the record \"",
        shown_record, "\", which has ", stored, kDamaged);
  uint64_t numel = 0;
  check(!c10::safe_multiplies_u64(result.sizes, &numel) && numel <= static_cast<uint64_t>(INT64_MAX) / 16,
        "has more elements than any memory", kDamaged);
  return result;
}

at::Tensor Archive::storage(const StoredTensor& tensor) const {
  const auto bytes = record(tensor.record);
  const size_t element = c10::elementSize(tensor.dtype);
  const auto numel = static_cast<int64_t>(bytes.size() / element);
  if (reinterpret_cast<uintptr_t>(bytes.data()) % element == 0) {
    return at::from_blob(const_cast<uint8_t*>(bytes.data()), {numel}, tensor.dtype);
  }
  at::Tensor copy = at::empty({numel}, tensor.dtype);
  std::memcpy(copy.data_ptr(), bytes.data(), static_cast<size_t>(numel) * element);
  return copy;
}

void Archive::read(const StoredTensor& tensor, int64_t offset, const at::Tensor& destination) const {
  const int64_t numel = destination.numel();
  require(destination.is_contiguous() && destination.device().is_cpu(), "destination: expected contiguous, on the CPU");
  require(offset >= 0 && offset <= tensor.numel() && numel <= tensor.numel() - offset, path(), ": elements ", offset,
          " to ", offset + numel, " of a tensor of ", tensor.numel());
  if (numel == 0) return;
  const at::Tensor target = destination.detach().view({-1});
  const at::Tensor stored = storage(tensor);
  if (is_row_major(tensor)) {
    target.copy_(stored.narrow(0, tensor.offset + offset, numel));
  } else {
    target.copy_(stored.as_strided(tensor.sizes, tensor.strides, tensor.offset).reshape({-1}).narrow(0, offset, numel));
  }
}

at::Tensor Archive::make(const StoredTensor& tensor, bool meta) const {
  at::Tensor value = at::empty(tensor.sizes, at::TensorOptions(tensor.dtype).device(meta ? at::kMeta : at::kCPU));
  if (!meta) read(tensor, 0, value);
  return value;
}

}  // namespace ds::exported
