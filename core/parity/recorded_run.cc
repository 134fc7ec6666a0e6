#include "core/parity/recorded_run.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/check.h"
#include "core/files/regular_file.h"
#include "core/json/parse_json.h"
#include "core/parity/parity_names.h"
#include "core/system_call.h"
#include "core/text.h"

namespace ds {
namespace {

using nlohmann::json;

constexpr size_t kMostLayoutBytes = 1 << 16;

double number_of(const json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::optional<double> optional_number(const json& value) {
  return value.is_null() ? std::nullopt : std::optional(number_of(value));
}

// Calls `read`. What it throws for JSON that is none, or lacks a key, comes out as an IoError that names the file.
template <class Read>
auto read_json(const std::string& path, const char* what, const Read& read) {
  try {
    return read();
  } catch (const json::exception& error) {
    throw IoError(cat(path, ": expected ", what, " of a parity run, found a damaged file (", error.what(),
                      "): the run was ended while it wrote, or another program has changed the file; run ",
                      "ds-launch parity again, with an empty --folder"));
  }
}

// Reads the lines of one data-parallel rank.
std::vector<json> read_lines(const std::string& path) {
  auto file = classic_stream<std::ifstream>(path);
  std::vector<json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(parse_json<json>(line));
  return lines;
}

void add_lines(const std::vector<json>& lines, RecordedRun& run) {
  run.steps.resize(std::max(run.steps.size(), lines.size()));
  for (size_t i = 0; i < lines.size(); ++i) {
    RecordedStep& step = run.steps[i];
    std::vector<double> losses;
    for (const json& loss : lines[i].at("losses")) losses.push_back(number_of(loss));
    step.losses.push_back(std::move(losses));
    step.loss = optional_number(lines[i].at("loss"));
    step.norm = optional_number(lines[i].at("norm"));
    step.applied = lines[i].at("applied").get<bool>();
    step.draws = step.draws || lines[i].at("draws").get<bool>();
    step.batches += lines[i].at("batches").get<int64_t>();
  }
}

}  // namespace

RecordedTensors::RecordedTensors(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    files_.emplace_back(path);
    read_json(path, "the tensors of a step", [&] { read(path); });
  }
}

void RecordedTensors::read(const std::string& path) {
  const auto bytes = files_.back().bytes();
  uint64_t length = 0;
  require<IoError>(bytes.size() >= sizeof(length), path, ": expected a safetensors file, found ", bytes.size(),
                   " bytes");
  std::memcpy(&length, bytes.data(), sizeof(length));
  require<IoError>(length <= bytes.size() - sizeof(length), path, ": expected a header of ", length, " bytes, found ",
                   bytes.size() - sizeof(length));
  const auto* const data = bytes.data() + sizeof(length) + length;
  const size_t data_bytes = bytes.size() - sizeof(length) - length;
  const std::string header(reinterpret_cast<const char*>(bytes.data()) + sizeof(length), length);
  const json entries = parse_json<json>(header);
  for (const auto& item : entries.items()) {
    if (item.key() == "__metadata__") continue;
    const std::string dtype = item.value().at("dtype").get<std::string>();
    const auto begin = item.value().at("data_offsets").at(0).get<size_t>();
    const auto end = item.value().at("data_offsets").at(1).get<size_t>();
    require<IoError>((dtype == "F32" || dtype == "F64") && begin <= end && end <= data_bytes, path, ": tensor ",
                     item.key(), ": expected float32 or float64 inside of the file, found ", dtype, " at ", begin,
                     " to ", end);
    const size_t width = dtype == "F64" ? sizeof(double) : sizeof(float);
    tensors_[item.key()] = {.data = data + begin, .count = (end - begin) / width, .is_double = dtype == "F64"};
  }
}

const RecordedTensor* RecordedTensors::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

RecordedTensors RecordedRun::tensors(size_t step) const {
  std::vector<std::string> paths;
  for (int64_t rank = 0; rank < pipe_ranks; ++rank) {
    paths.push_back(parity_path(folder, parity_step_file(static_cast<int64_t>(step), rank)));
  }
  return RecordedTensors(paths);
}

RecordedLayout read_layout(const std::string& folder) {
  const std::string path = parity_path(folder, kParityLayoutFile);
  const FileText file = read_regular_file(path, kMostLayoutBytes);
  require<IoError>(file.trouble.empty(), path, ": expected the layout of a run that is over: ", file.trouble,
                   "; the program has not come to engine::initialize(), or failed there");
  return read_json(path, "the layout", [&] {
    const json layout = parse_json<json>(file.text);
    return RecordedLayout{.data_ranks = layout.at("data_ranks").get<int64_t>(),
                          .micro_batch = layout.at("micro_batch").get<int64_t>(),
                          .accumulation = layout.at("accumulation").get<int64_t>(),
                          .tensor_ranks = layout.at("tensor_ranks").get<int64_t>(),
                          .pipe_ranks = layout.at("pipe_ranks").get<int64_t>(),
                          .stage = layout.at("stage").get<int64_t>(),
                          .dtype = layout.at("dtype").get<std::string>()};
  });
}

RecordedRun read_run(const std::string& folder, const std::optional<RecordedLayout>& layout) {
  RecordedRun run{.folder = folder, .layout = layout ? *layout : read_layout(folder), .steps = {}};
  const int64_t ranks = layout ? 1 : run.layout.data_ranks;
  if (layout) {
    run.layout.dtype = read_layout(folder).dtype;
  } else {
    run.pipe_ranks = run.layout.pipe_ranks;
  }
  size_t least = std::numeric_limits<size_t>::max();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::string path = parity_path(folder, parity_losses_file(rank));
    read_json(path, "the losses", [&] {
      const std::vector<json> lines = read_lines(path);
      least = std::min(least, lines.size());
      add_lines(lines, run);
    });
  }
  require<IoError>(least > 0, folder, ": expected at least one step of each rank, found none: the program has made ",
                   "no step, or drives its engine by calls that are not recorded");
  run.steps.resize(least);
  return run;
}

RecordFolder::RecordFolder(const std::string& wanted) : stays_(!wanted.empty()) {
  namespace fs = std::filesystem;
  if (stays_) {
    fs::create_directories(wanted);
    require<ConfigError>(fs::is_empty(wanted), "--folder: expected an empty folder, found files in ", wanted);
    path_ = fs::absolute(wanted).string();
  } else {
    path_ = (fs::temp_directory_path() / "ds-parity.XXXXXX").string();
    require_system<IoError>(mkdtemp(path_.data()) != nullptr, path_, ": the folder of the records cannot be made");
  }
  fs::create_directories(of_run());
  fs::create_directories(of_other_order());
  fs::create_directories(of_reference());
}

RecordFolder::~RecordFolder() {
  std::error_code none;
  if (!stays_) std::filesystem::remove_all(path_, none);
}

}  // namespace ds
