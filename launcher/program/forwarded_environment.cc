#include "launcher/program/forwarded_environment.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>

#include "core/ascii.h"
#include "core/check.h"
#include "core/restart_request.h"
#include "core/text.h"
#include "core/utf8.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

constexpr std::array<std::string_view, 14> kPrefixes = {"NCCL",  "GLOO",    "UCX",    "FI_",     "MLFLOW",
                                                        "OMP_",  "MKL_",    "KMP_",   "GOMP_",   "TORCHELASTIC_",
                                                        "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_"};
constexpr std::array<std::string_view, 2> kNames = {"PATH", "LD_LIBRARY_PATH"};
constexpr std::string_view kOwnPrefix = "DS_";
// CUDA_VISIBLE_DEVICES: which GPUs a host has is its own matter.
constexpr std::array<std::string_view, 4> kNever = {kLaunchIdVariable, "DS_ENV_FILE", kRestartFileVariable,
                                                    "CUDA_VISIBLE_DEVICES"};

std::string_view name_of(std::string_view entry) { return entry.substr(0, entry.find('=')); }

// NAME="value" and NAME='value' without the quotes, as a shell reads them. Quotes inside of a value are parts of it.
std::string without_quotes(std::string_view entry) {
  const std::string_view value = entry.substr(entry.find('=') + 1);
  const bool quoted = value.size() >= 2 && value.front() == value.back() && (value[0] == '"' || value[0] == '\'') &&
                      value.find(value[0], 1) == value.size() - 1;
  std::string result(entry.substr(0, entry.size() - value.size()));
  return result.append(quoted ? value.substr(1, value.size() - 2) : value);
}

bool is_name(std::string_view text) {
  return !text.empty() && !is_ascii_digit(text[0]) && std::all_of(text.begin(), text.end(), [](char c) {
    return is_ascii_letter(c) || is_ascii_digit(c) || c == '_';
  });
}

}  // namespace

bool is_forwarded(std::string_view name) {
  if (std::find(kNever.begin(), kNever.end(), name) != kNever.end()) return false;
  return name.starts_with(kOwnPrefix) || std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](std::string_view p) { return name.starts_with(p); });
}

std::vector<std::string> parse_environment_file(std::string_view text, const std::string& file) {
  text = without_byte_order_mark(text);
  std::vector<std::string> entries;
  int number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos || line.starts_with('#')) continue;
    require<ConfigError>(line.find('=') != std::string_view::npos && is_name(name_of(line)), file, ", line ", number,
                         ": expected NAME=value, found '", line, "'");
    entries.push_back(without_quotes(line));
  }
  return entries;
}

std::vector<std::string> forwarded_environment(const std::vector<std::string>& environment,
                                               const std::filesystem::path& home, const std::filesystem::path& here) {
  std::vector<std::string> entries;
  for (const std::string& entry : environment) {
    if (is_forwarded(name_of(entry))) entries.push_back(entry);
  }
  const std::string asked = environment_value(environment, "DS_ENV_FILE").value_or("");
  const std::filesystem::path name = asked.empty() ? ".deepspeed_env" : asked;
  bool found = false;
  std::vector<std::filesystem::path> files = {home / name, here / name};  // an absolute name stands for itself
  if (files[0].lexically_normal() == files[1].lexically_normal()) files.pop_back();
  for (const std::filesystem::path& file : files) {
    auto in = classic_stream<std::ifstream>(file, std::ios::binary);
    if (!in.is_open()) continue;
    found = true;
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    for (std::string& entry : parse_environment_file(text, file.string())) entries.push_back(std::move(entry));
  }
  require<IoError>(found || asked.empty(), "DS_ENV_FILE=", asked, ": there is no such file in ", home.native(), " or ",
                   here.native());
  return entries;
}

std::vector<std::string> with_entries(std::vector<std::string> base, const std::vector<std::string>& entries) {
  for (const std::string& entry : entries) {
    std::erase_if(base, [&](const std::string& old) { return name_of(old) == name_of(entry); });
    base.push_back(entry);
  }
  return base;
}

}  // namespace ds::launcher
