// Every input that a fuzzer or a person found worth keeping, whole, cut short, and with changed bytes: each is read, or
// refused in words. What a fuzzer found is a file in corpus/READER. Runs with the sanitizers, too. DS_FUZZ_READERS: a
// list of tests/fuzz/readers.h or tests/fuzz/checkpoint_readers.h.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/checkpoint_readers.h"
#include "tests/fuzz/readers.h"

namespace ds::fuzz {
namespace {

std::vector<std::filesystem::path> files_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Corpus : public ::testing::TestWithParam<Reader> {
 protected:
  static std::vector<std::string> inputs() {
    const std::filesystem::path source(DS_SOURCE_DIR);
    std::vector<std::string> found;
    for (const auto& file : files_of(source / "tests/fuzz/corpus" / GetParam().name)) found.push_back(bytes_of(file));
    if (std::string_view(GetParam().name) == "config") {
      for (const auto& file : files_of(source / "configs")) {
        if (file.extension() == ".json") found.push_back(bytes_of(file));
      }
    }
    return found;
  }

  // What the reader does not refuse in words ends the test with what it threw.
  static void read(const std::string& bytes) { ASSERT_NO_THROW(GetParam().read(bytes)) << "input: " << bytes; }
};

TEST_P(Corpus, IsReadOrRefused) {
  const std::vector<std::string> all = inputs();
  ASSERT_FALSE(all.empty());
  for (const std::string& input : all) read(input);
  read("");
}

TEST_P(Corpus, IsReadOrRefusedWhenItIsCutShort) {
  for (const std::string& input : inputs()) {
    const size_t step = std::max<size_t>(1, input.size() / 100);
    for (size_t size = 0; size < input.size(); size += step) read(input.substr(0, size));
  }
}

TEST_P(Corpus, IsReadOrRefusedWithOtherBytes) {
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp): the same in every run
  constexpr char kLikely[] = "\0\xff{}[]\",:-+.e0189 \n=@#()x";
  constexpr size_t kLetters = sizeof kLikely - 1;
  for (const std::string& input : inputs()) {
    if (input.empty()) continue;
    for (int change = 0; change < 200; ++change) {
      std::string changed = input;
      for (int byte = 0; byte < 1 + change % 3; ++byte) {
        changed[random() % changed.size()] = kLikely[random() % kLetters];
      }
      read(changed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Corpus, ::testing::ValuesIn(DS_FUZZ_READERS),
                         [](const auto& reader) { return std::string(reader.param.name); });

}  // namespace
}  // namespace ds::fuzz
