// Where tests find the files that llama_fixture.py has made.
#pragma once

#include <string>

namespace llama {

// The folder of a family, or another path in the folder of all of them.
inline std::string fixture(const std::string& name) { return DS_SOURCE_DIR "/tests/examples/llama/" + name; }

}  // namespace llama
