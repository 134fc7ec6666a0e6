// Rules about the source tree itself: includes point down only and in no circle, programs see public headers alone, and
// no test file is forgotten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/ascii.h"

namespace ds {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

namespace fs = std::filesystem;

const fs::path kRoot = DS_SOURCE_DIR;

// Folder -> level; a folder may include itself and folders of a lower level (docs/design.md, section 4).
const std::map<std::string, int> kLevels = {
    {"core", 0},   {"launcher", 1},  {"comm", 1},      {"optim", 1},      {"ops", 1},         {"data", 1},
    {"zero", 2},   {"offload", 2},   {"recompute", 2}, {"parallel", 2},   {"compression", 2}, {"pipeline", 2},
    {"layers", 2}, {"profiling", 2}, {"exported", 2},  {"config", 3},     {"checkpoint", 3},  {"model", 4},
    {"engine", 5}, {"loops", 5},     {"examples", 7},  {"benchmarks", 7}, {"tests", 7},       {"tools", 7},
};
constexpr int kTopLevel = 7;

// The list of public headers that CMake and scripts/api_reference read, too.
const fs::path kHeaderList = kRoot / "include/dsengine/headers.txt";

// Public header -> the folder at whose level it stands.
std::map<std::string, std::string> read_header_list() {
  std::map<std::string, std::string> result;
  std::ifstream in(kHeaderList);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string header;
    std::string folder;
    if (words >> header >> folder && !header.starts_with("#")) result.emplace("dsengine/" + header, folder);
  }
  return result;
}

const std::map<std::string, std::string> kPublicHeaders = read_header_list();
constexpr size_t kMostPublicHeaders = 53;
constexpr int kMostLines = 230;  // of a public header
// The class that a program calls, whose methods DeepSpeed's names decide, may have more.
constexpr int kMostLinesOfTheEngine = 299;

// A file, from the root ("include/dsengine/zero.h" as "dsengine/zero.h"), and what it includes in quotes or, of ours,
// in angles.
struct Include {
  std::string file;
  std::string target;
};

std::string text_of(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<fs::path> files_below(const fs::path& folder, const std::set<std::string>& endings) {
  std::vector<fs::path> result;
  if (!fs::exists(folder)) return result;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && endings.contains(entry.path().extension().string())) result.push_back(entry.path());
  }
  return result;
}

// All matches of the first group.
std::vector<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::vector<std::string> result;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) result.push_back((*it)[1]);
  return result;
}

// What a file includes between `open` and `close`.
std::vector<std::string> includes_between(const fs::path& path, char open, char close) {
  std::vector<std::string> result;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> std::ws && words.get() == '#' && words >> word && word == "include")) continue;
    words >> std::ws;
    if (words.get() == open && std::getline(words, word, close)) result.push_back(word);
  }
  return result;
}

std::vector<std::string> quoted_includes(const fs::path& path) { return includes_between(path, '"', '"'); }
std::vector<std::string> angle_includes(const fs::path& path) { return includes_between(path, '<', '>'); }

std::string first_part(const std::string& path) { return path.substr(0, path.find('/')); }

// "core" of "core/check.h", "zero" of "dsengine/zero.h"; empty where no folder of ours is meant.
std::string folder_of(const std::string& path) {
  if (const auto found = kPublicHeaders.find(path); found != kPublicHeaders.end()) return found->second;
  const std::string folder = first_part(path);
  return kLevels.contains(folder) ? folder : "";
}

// "comm/flight" of "comm/flight/contract.h", "comm" of "comm/subgroups.h": flat files are a room of their own.
std::string room_of(const std::string& path) {
  const std::string folder = first_part(path);
  const size_t end = path.find('/', folder.size() + 1);
  return end == std::string::npos ? folder : path.substr(0, end);
}

std::vector<Include> includes_of_the_tree() {
  std::vector<Include> result;
  const auto add = [&](const fs::path& root, const fs::path& folder) {
    for (const fs::path& file : files_below(folder, {".h", ".cc", ".cu"})) {
      for (const std::string& target : quoted_includes(file)) {
        result.push_back({fs::relative(file, root).string(), target});
      }
      for (const std::string& target : angle_includes(file)) {
        if (!folder_of(target).empty()) result.push_back({fs::relative(file, root).string(), target});
      }
    }
  };
  for (const auto& [folder, level] : kLevels) add(kRoot, kRoot / folder);
  add(kRoot / "include", kRoot / "include" / "dsengine");
  return result;
}

// Includes that point up or sideways, in words. A public header counts as a file of its folder, and includes public
// headers only.
std::vector<std::string> upward(const std::vector<Include>& includes) {
  std::vector<std::string> wrong;
  for (const auto& [file, target] : includes) {
    const std::string from = folder_of(file);
    const std::string to = folder_of(target);
    if (from.empty()) {
      wrong.push_back(file + " is a public header without a folder; name it in include/dsengine/headers.txt");
      continue;
    }
    const int level = kLevels.at(from);
    if (to.empty()) {
      if (level == kTopLevel && !target.starts_with("dsengine/")) continue;  // a file beside it
      wrong.push_back(
          file + " includes \"" + target +
          "\"; includes are written from the repository root, as \"core/check.h\", or name a public header");
    } else if (kPublicHeaders.contains(file) && !kPublicHeaders.contains(target)) {
      wrong.push_back(file + " includes \"" + target + "\": a public header includes public headers only");
    } else if (to != from && kLevels.at(to) >= level && level != kTopLevel) {
      wrong.push_back(file + " includes \"" + target + "\": folder " + from + " (level " + std::to_string(level) +
                      ") may include itself and lower levels only, " + to + " is at level " +
                      std::to_string(kLevels.at(to)));
    }
  }
  return wrong;
}

// Rooms of one folder that include each other in a circle, in words; of each circle one.
std::vector<std::string> circles(const std::vector<Include>& includes) {
  std::map<std::string, std::set<std::string>> below;
  for (const auto& [file, target] : includes) {
    const std::string from = room_of(file);
    const std::string to = room_of(target);
    const bool one_folder = first_part(file) == first_part(target) && first_part(file) != "dsengine";
    if (one_folder && from != to && kLevels.contains(first_part(file))) below[from].insert(to);
  }
  std::vector<std::string> found;
  std::set<std::string> done;
  std::vector<std::string> path;
  const auto visit = [&](const auto& self, const std::string& room) -> void {
    const auto begin = std::find(path.begin(), path.end(), room);
    if (begin != path.end()) {
      std::string text;
      for (auto it = begin; it != path.end(); ++it) text += *it + " -> ";
      found.push_back(text + room);
      return;
    }
    if (done.contains(room)) return;
    path.push_back(room);
    for (const std::string& next : below[room]) self(self, next);
    path.pop_back();
    done.insert(room);
  };
  std::vector<std::string> rooms;
  for (const auto& [room, targets] : below) rooms.push_back(room);
  for (const std::string& room : rooms) visit(visit, room);
  return found;
}

TEST(SourceTree, FolderIncludesPointDownOnly) {
  const std::vector<Include> includes = includes_of_the_tree();
  EXPECT_THAT(upward(includes), IsEmpty());
  EXPECT_GT(includes.size(), 500U) << "the test must see the source tree";
}

// ds-tool answers from configs, plans, checkpoints and records of a job; it never drives a step.
std::vector<std::string> engine_in_tools(const std::vector<Include>& includes) {
  std::vector<std::string> wrong;
  for (const auto& [file, target] : includes) {
    if (first_part(file) == "tools" && folder_of(target) == "engine") wrong.push_back(file + " includes " + target);
  }
  return wrong;
}

TEST(SourceTree, ToolsIncludeNothingOfTheEngine) {
  EXPECT_THAT(engine_in_tools(includes_of_the_tree()), IsEmpty());
  EXPECT_THAT(engine_in_tools({{"tools/ds_tool.cc", "engine/engine_impl.h"}, {"tools/ds_tool.cc", "model/state/x.h"}}),
              ElementsAre(HasSubstr("engine_impl.h")));
}

TEST(SourceTree, APlantedIncludeUpwardsIsFound) {
  const auto found = [](const std::string& file, const std::string& target) { return upward({{file, target}}); };
  EXPECT_THAT(found("core/check.cc", "comm/subgroups.h"), ElementsAre(HasSubstr("core (level 0)")));
  EXPECT_THAT(found("zero/init.cc", "offload/arena.h"), ElementsAre(HasSubstr("offload is at level 2")));
  EXPECT_THAT(found("zero/init.cc", "check.h"), ElementsAre(HasSubstr("written from the repository root")));
  EXPECT_THAT(found("comm/subgroups.cc", "dsengine/zero.h"), ElementsAre(HasSubstr("zero is at level 2")));
  EXPECT_THAT(found("dsengine/comm.h", "dsengine/engine.h"), ElementsAre(HasSubstr("engine is at level 5")));
  EXPECT_THAT(found("model/state/model_state.h", "engine/engine_impl.h"),
              ElementsAre(HasSubstr("engine is at level 5")));
  EXPECT_THAT(found("loops/join.cc", "engine/engine_impl.h"), ElementsAre(HasSubstr("engine is at level 5")));
  EXPECT_THAT(found("dsengine/engine.h", "core/check.h"), ElementsAre(HasSubstr("public headers only")));
  EXPECT_THAT(found("dsengine/engine.h", "dsengine/unknown.h"), ElementsAre(HasSubstr("name a public header")));
  EXPECT_THAT(found("dsengine/unknown.h", "dsengine/engine.h"),
              ElementsAre(HasSubstr("name it in include/dsengine/headers.txt")));
  EXPECT_THAT(found("zero/init.cc", "dsengine/zero.h"), IsEmpty());
  EXPECT_THAT(found("dsengine/engine.h", "dsengine/comm.h"), IsEmpty());
  EXPECT_THAT(found("tests/core/hash_test.cc", "engine/engine_impl.h"), IsEmpty());
}

TEST(SourceTree, RoomsOfAFolderIncludeEachOtherInNoCircle) { EXPECT_THAT(circles(includes_of_the_tree()), IsEmpty()); }

TEST(SourceTree, APlantedCircleOfRoomsIsFound) {
  EXPECT_THAT(circles({{"zero/a.h", "zero/room/b.h"}, {"zero/room/b.h", "zero/a.h"}}),
              ElementsAre("zero -> zero/room -> zero"));
  EXPECT_THAT(circles({{"zero/a/x.h", "zero/b/y.h"}, {"zero/b/z.cc", "zero/c/z.h"}, {"zero/c/z.h", "zero/a/x.h"}}),
              ElementsAre("zero/a -> zero/b -> zero/c -> zero/a"));
  EXPECT_THAT(circles({{"zero/a/x.h", "zero/b/y.h"}, {"zero/b/y.h", "zero/c.h"}, {"zero/a/z.h", "zero/c.h"}}),
              IsEmpty());
  EXPECT_THAT(circles({{"zero/a/x.h", "zero/a/y.h"}, {"zero/a/y.h", "zero/a/x.h"}}), IsEmpty()) << "one room";
}

TEST(SourceTree, PublicHeadersAreFewAndStandAlone) {
  const fs::path folder = kRoot / "include";
  EXPECT_THAT(text_of(kRoot / "CMakeLists.txt"), HasSubstr("include/dsengine/headers.txt"));
  // LibTorch, the standard library and, for the config object, nlohmann's JSON.
  const std::regex foreign(R"re((ATen|c10|torch)/.*|[a-z_]+|nlohmann/json\.hpp)re");
  std::set<std::string> seen;
  for (const fs::path& file : files_below(folder, {".h", ".cc", ".hpp"})) {
    const std::string name = fs::relative(file, folder).string();
    const std::string text = text_of(file);
    seen.insert(name);
    EXPECT_TRUE(kPublicHeaders.contains(name))
        << name << " belongs to no folder; name it in include/dsengine/headers.txt";
    EXPECT_TRUE(text.starts_with("// ")) << name << " does not say what it is";
    const int most = name == "dsengine/engine.h" ? kMostLinesOfTheEngine : kMostLines;
    EXPECT_LE(std::count(text.begin(), text.end(), '\n'), most) << name;
    for (const std::string& include : angle_includes(file)) EXPECT_TRUE(std::regex_match(include, foreign)) << name;
  }
  for (const auto& [name, level_of] : kPublicHeaders) {
    EXPECT_TRUE(seen.contains(name)) << name << " is listed and does not exist";
    EXPECT_TRUE(kLevels.contains(level_of)) << name << " is listed with the unknown folder " << level_of;
  }
  EXPECT_LE(seen.size(), kMostPublicHeaders);
}

TEST(SourceTree, ExamplesIncludePublicHeadersAlone) {
  for (const fs::path& file : files_below(kRoot / "examples", {".h", ".cc"})) {
    for (const std::string& include : quoted_includes(file)) {
      EXPECT_TRUE(fs::exists(file.parent_path() / include)) << file << " includes " << include;
    }
    for (const std::string& include : angle_includes(file)) {
      EXPECT_FALSE(kLevels.contains(first_part(include))) << file << " includes " << include;
    }
  }
}

TEST(SourceTree, TheVersionOfTheHeadersIsThatOfTheProject) {
  static const std::regex kProject(R"re(project\(dsengine VERSION ([0-9.]+))re");
  static const std::regex kHeader(R"re(DSENGINE_VERSION "([0-9.]+)")re");
  static const std::regex kPart(R"re(DSENGINE_VERSION_[A-Z]+ ([0-9]+))re");
  const std::string header = text_of(kRoot / "include/dsengine/version.h");
  const std::vector<std::string> project = matches(text_of(kRoot / "CMakeLists.txt"), kProject);
  ASSERT_EQ(project.size(), 1U);
  EXPECT_EQ(matches(header, kHeader), project);
  std::string joined;
  for (const std::string& part : matches(header, kPart)) joined += (joined.empty() ? "" : ".") + part;
  EXPECT_EQ(joined, project[0]);
}

TEST(SourceTree, TheLauncherIncludesTheTorchFreePartOfCoreOnly) {
  for (const fs::path& file : files_below(kRoot / "launcher", {".h", ".cc"})) {
    for (const std::string& include : quoted_includes(file)) {
      const std::string folder = folder_of(include);
      EXPECT_TRUE(folder == "launcher" || folder == "core") << file << " includes " << include;
    }
    EXPECT_EQ(text_of(file).find("#include <torch/"), std::string::npos) << file;
    EXPECT_EQ(text_of(file).find("#include <ATen/"), std::string::npos) << file;
  }
}

TEST(SourceTree, OnlyProgramsIncludeTheLauncher) {
  for (const Include& include : includes_of_the_tree()) {
    if (first_part(include.target) != "launcher" || first_part(include.file) == "launcher") continue;
    EXPECT_EQ(kLevels.at(first_part(include.file)), kTopLevel) << include.file << " includes " << include.target;
  }
}

TEST(SourceTree, EveryTestFileIsRegistered) {
  int files = 0;
  for (const fs::path& file : files_below(kRoot / "tests", {".cc"})) {
    if (!file.stem().string().ends_with("_test")) continue;
    ++files;
    fs::path folder = file.parent_path();
    while (!fs::exists(folder / "CMakeLists.txt")) folder = folder.parent_path();  // rooms have no list of their own
    EXPECT_NE(text_of(folder / "CMakeLists.txt").find(fs::relative(file, folder).string()), std::string::npos)
        << fs::relative(file, kRoot) << " is not named in " << fs::relative(folder / "CMakeLists.txt", kRoot);
  }
  EXPECT_GT(files, 5) << "the test must see the source tree";
}

// The code that runs in a program of somebody else's, or beside it: all folders but programs of our own and tests.
std::vector<fs::path> product_files() {
  std::vector<fs::path> files = files_below(kRoot / "include", {".h"});
  for (const auto& [folder, level] : kLevels) {
    if (folder == "examples" || folder == "benchmarks" || folder == "tests") continue;
    for (const fs::path& file : files_below(kRoot / folder, {".h", ".cc", ".cu"})) files.push_back(file);
  }
  return files;
}

// Whether a function of that name is called: `std::isdigit(c)`, and not `is_ascii_digit(c)` or `at::isdigits(c)`.
bool calls(const std::string& code, const std::string& function) {
  const auto is_of_a_name = [](char c) { return c == '_' || is_ascii_letter(c) || is_ascii_digit(c); };
  for (size_t at = code.find(function + "("); at != std::string::npos; at = code.find(function + "(", at + 1)) {
    if (at == 0 || !is_of_a_name(code[at - 1])) return true;
  }
  return false;
}

// Returns what in the line follows the locale of the program, so that a file or a message to a machine would differ
// from one desktop to the next; empty: nothing does.
std::string locale_in(const std::string& line) {
  static const std::vector<std::string> kFunctions = {
      "strtof",    "strtod",  "strtold", "atof",    "sscanf",  "stof",       "stod",      "stold",
      "setlocale", "tolower", "toupper", "isalpha", "isalnum", "isdigit",    "isxdigit",  "isspace",
      "isupper",   "islower", "isprint", "ispunct", "strcoll", "strcasecmp", "localeconv"};
  static const std::regex kPrintedFloat(R"re(printf\(.*%[-+ #0-9.*]*[aefgAEFG])re");
  static const std::regex kStream(R"re(std::(?:basic_)?[io]?(?:string|f)stream\b(?![&>]))re");
  const std::string code = line.substr(0, line.find("//"));
  for (const std::string& function : kFunctions) {
    if (calls(code, function)) return function;
  }
  const auto has = [&code](const char* part) { return code.find(part) != std::string::npos; };
  if (has("printf(") && std::regex_search(code, kPrintedFloat)) return "printf of a floating-point number";
  if (has("stream") && !has("classic_stream<") && std::regex_search(code, kStream)) return "a stream";
  for (const char* reader : {"json::parse(", "Json::parse(", "json::accept(", "json::sax_parse("}) {
    if (has(reader)) return "json::parse";
  }
  return "";
}

// Where they stand, each with what keeps the locale away from it.
const std::set<std::string> kOutsideTheLocale = {
    "core/number_text.cc: strtod",          // in a ClassicScope
    "core/json/parse_json.h: json::parse",  // in a ClassicScope
    "engine/parity_record.h: a stream",     // a member; made by classic_stream
    "profiling/csv_monitor.cc: a stream",   // a member; made by classic_stream
    "profiling/metric_files.cc: a stream", "profiling/tensorboard_monitor.cc: a stream",
};

TEST(SourceTree, NothingFollowsTheLocaleOfTheProgram) {
  std::set<std::string> unused = kOutsideTheLocale;
  for (const fs::path& file : product_files()) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
      const std::string what = locale_in(line);
      if (what.empty()) continue;
      const std::string name = fs::relative(file, kRoot).string() + ": " + what;
      unused.erase(name);
      EXPECT_TRUE(kOutsideTheLocale.contains(name))
          << name << " follows the locale of the program; use core/text.h (cat, fixed, classic_stream), core/ascii.h, "
          << "core/number_text.h or core/json/parse_json.h:\n"
          << line;
    }
  }
  EXPECT_THAT(unused, IsEmpty()) << "allowed, and there no more";
}

TEST(SourceTree, APlantedUseOfTheLocaleIsFound) {
  EXPECT_EQ(locale_in("  return std::strtod(text, nullptr);"), "strtod");
  EXPECT_EQ(locale_in("  lr = std::stod(word);"), "stod");
  EXPECT_EQ(locale_in("[](unsigned char c) { return std::tolower(c); }"), "tolower");
  EXPECT_EQ(locale_in("if (isspace(c)) return;"), "isspace");
  EXPECT_THAT(locale_in("  std::snprintf(text, sizeof text, \"%.1f GiB\", size);"), HasSubstr("printf"));
  EXPECT_EQ(locale_in("  std::ostringstream out;"), "a stream");
  EXPECT_EQ(locale_in("  if (std::ifstream file(path); file >> number) {"), "a stream");
  EXPECT_EQ(locale_in("  json value = json::parse(text);"), "json::parse");
  EXPECT_EQ(locale_in("  auto out = classic_stream<std::ostringstream>();"), "");
  EXPECT_EQ(locale_in("std::string header(std::ifstream& in, const std::string& path) {"), "");
  EXPECT_EQ(locale_in("  std::snprintf(name, sizeof name, \"%08x%08x\", a, b);"), "");
  EXPECT_EQ(locale_in("  if (is_ascii_digit(c)) return;  // not std::isdigit(c)"), "");
}

TEST(SourceTree, NoFolderForWhatHasNoName) {
  for (const char* name : {"utils", "util", "common", "misc", "helpers"}) {
    for (const auto& [folder, level] : kLevels)
      EXPECT_FALSE(fs::exists(kRoot / folder / name)) << folder << "/" << name;
    EXPECT_FALSE(fs::exists(kRoot / name)) << name;
  }
}

}  // namespace
}  // namespace ds
