// Where a ds_config comes from. Torch-free.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/json/hjson.h"

namespace ds::engine::config {

// Implicitly made from
//   * text: the path of a file, read as hjson (comments, trailing commas, unquoted keys, as DeepSpeed allows); when no
//     such file exists, url-safe base64 of JSON text;
//   * a std::filesystem::path: a file only;
//   * a JSON object built in code.
// Nothing is read before read() is called.
class ConfigSource {
 public:
  ConfigSource() = default;
  ConfigSource(const char* path_or_base64) : text_(path_or_base64) {}
  ConfigSource(std::string path_or_base64) : text_(std::move(path_or_base64)) {}
  ConfigSource(const std::filesystem::path& path) : text_(path.string()), file_only_(true) {}
  ConfigSource(const nlohmann::json& object) : object_(object), is_object_(true) {}
  ConfigSource(const nlohmann::ordered_json& object) : object_(object), is_object_(true) {}

  bool empty() const { return text_.empty() && !is_object_; }
  // "ds_config.json", "base64 text" or "JSON object": what messages begin with.
  std::string name() const;
  // Throws ConfigError: nothing given, neither a file nor base64, unreadable, a syntax error with line and column.
  HjsonDocument read() const;

 private:
  std::string text_;
  nlohmann::ordered_json object_;
  bool file_only_ = false;
  bool is_object_ = false;
};

}  // namespace ds::engine::config
