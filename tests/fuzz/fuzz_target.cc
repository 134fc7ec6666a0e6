// One reader under libFuzzer (scripts/fuzz): DS_FUZZ_READER names it.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/checkpoint_readers.h"
#include "tests/fuzz/readers.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ds::fuzz::DS_FUZZ_READER({reinterpret_cast<const char*>(data), size});
  return 0;
}
