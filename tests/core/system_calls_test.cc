// Rules about system calls in the library's sources: descriptors have an owner, and the system's reasons one spelling.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace ds {
namespace {

namespace fs = std::filesystem;

const fs::path kSourceRoot = DS_SOURCE_DIR;

// The folders of the library. Programs (tools, launcher) have rules of their own for what they hand to their children.
constexpr const char* kFolders[] = {"core",      "comm",      "optim",       "ops",      "zero",       "offload",
                                    "recompute", "profiling", "compression", "pipeline", "checkpoint", "engine"};

struct Source {
  std::string name;
  std::string text;
};

std::vector<Source> library_sources() {
  std::vector<Source> result;
  for (const char* folder : kFolders) {
    for (const auto& entry : fs::recursive_directory_iterator(kSourceRoot / folder)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".h" && ending != ".cc" && ending != ".cu") continue;
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      result.push_back({fs::relative(entry.path(), kSourceRoot).string(), text.str()});
    }
  }
  return result;
}

std::string line_at(const std::string& text, size_t position) {
  const size_t begin = text.rfind('\n', position) + 1;
  return text.substr(begin, text.find('\n', position) - begin);
}

// close(2) with an argument: neither a member that is called on something nor a declaration ("void close(...)").
std::vector<std::string> closings_in(const std::string& text) {
  static const std::regex kClose(R"re((^|[^\w.>:])(return\s+)?(::)?close\(\s*[^)\s])re");
  static const std::regex kDeclared(R"re(\w\s+close\()re");
  std::vector<std::string> lines;
  for (std::sregex_iterator it(text.begin(), text.end(), kClose), end; it != end; ++it) {
    const std::string line = line_at(text, static_cast<size_t>(it->position() + it->length()) - 1);
    if (!std::regex_search(line, kDeclared) || line.find("return close(") != std::string::npos) lines.push_back(line);
  }
  return lines;
}

TEST(SystemCalls, TheRuleKnowsACloseFromAMemberOfThatName) {
  EXPECT_EQ(closings_in("  close(fd);\n").size(), 1);
  EXPECT_EQ(closings_in("  if (fd >= 0) ::close(std::exchange(fd, -1));\n").size(), 1);
  EXPECT_EQ(closings_in("  return close(fd) == 0;\n").size(), 1);
  EXPECT_EQ(closings_in("  file.close();\n  wire->close(reason);\n  close();\n").size(), 0);
  EXPECT_EQ(closings_in("void Wire::close(const std::string& reason) {\n  void close(int reason);\n").size(), 0);
}

TEST(SystemCalls, OnlyUniqueFdClosesDescriptors) {
  size_t looked_at = 0;
  for (const Source& source : library_sources()) {
    const bool sees_close = source.text.find("<unistd.h>") != std::string::npos ||
                            source.text.find("core/unique_fd.h") != std::string::npos;
    if (!sees_close || source.name == "core/unique_fd.h") continue;
    ++looked_at;
    for (const std::string& line : closings_in(source.text)) {
      ADD_FAILURE() << source.name << ": \"" << line << "\": expected a ds::UniqueFd (core/unique_fd.h) that owns it";
    }
  }
  EXPECT_GT(looked_at, 10) << "the test must see the source tree";
}

// The system's text of an error, but for gai_strerror, which has numbers of its own.
std::vector<std::string> reasons_in(const std::string& text) {
  std::vector<std::string> lines;
  for (const char* const call : {"strerror(", "strerror_r(", "_category().message("}) {
    for (size_t at = text.find(call); at != std::string::npos; at = text.find(call, at + 1)) {
      const bool of_addresses = call[0] == 's' && at > 0 && text[at - 1] == '_';
      if (!of_addresses) lines.push_back(line_at(text, at));
    }
  }
  return lines;
}

TEST(SystemCalls, ReasonsComeFromOnePlace) {
  EXPECT_EQ(reasons_in("  throw cat(std::strerror(errno));\n").size(), 1);
  EXPECT_EQ(reasons_in("  return gai_strerror(error);\n").size(), 0);
  size_t looked_at = 0;
  for (const Source& source : library_sources()) {
    ++looked_at;
    for (const std::string& line : reasons_in(source.text)) {
      ADD_FAILURE() << source.name << ": \"" << line
                    << "\": expected require_system() or a SystemReason (core/system_call.h)";
    }
  }
  EXPECT_GT(looked_at, 100) << "the test must see the source tree";
}

}  // namespace
}  // namespace ds
