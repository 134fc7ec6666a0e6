// Short forms for tests of the ds_config.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/check.h"
#include "core/json/hjson.h"
#include "dsengine/config.h"
#include "tests/support/thrown.h"

namespace ds::engine::config {

inline nlohmann::ordered_json object_of(const std::string& hjson) { return parse_hjson(hjson, "test").root; }

// The config of hjson text; a batch size is added where there is none.
inline DsConfig parse_text(const std::string& hjson, const ParseOptions& options = {}) {
  nlohmann::ordered_json object = object_of(hjson);
  if (!object.contains("train_batch_size") && !object.contains("train_micro_batch_size_per_gpu")) {
    object["train_micro_batch_size_per_gpu"] = 1;
  }
  return parse(object, options);
}

// The message of the ConfigError that parse_text throws; empty: it throws none.
inline std::string refusal_of(const std::string& hjson, const ParseOptions& options = {}) {
  return test::thrown_by<ConfigError>([&] { parse_text(hjson, options); }, "");
}

// The warnings joined, one a line.
inline std::string warnings_of(const std::string& hjson) {
  std::string text;
  for (const std::string& line : parse_text(hjson).warnings) text += line + "\n";
  return text;
}

}  // namespace ds::engine::config
