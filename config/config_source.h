// Reading what a ConfigSource stands for. Torch-free.
#pragma once

#include "core/json/hjson.h"
#include "dsengine/config.h"

namespace ds::engine::config {

struct ConfigReader {
  // Throws ConfigError: nothing given, neither a file nor base64, unreadable, a syntax error with line and column.
  static HjsonDocument read(const ConfigSource& source);
};

}  // namespace ds::engine::config
