// The pages stay readable and true: short table cells, a short changelog, and no page that calls something missing
// which docs/status.md calls working.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/core/page.h"

namespace ds::docs {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostCharacters = 200;  // of a table's cell
constexpr size_t kMostChangelogLines = 200;

// Characters, not bytes: continuation bytes of UTF-8 do not count.
size_t characters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// The cells of a line of a table. A bar behind a backslash belongs to its cell.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::string cell;
  for (size_t i = 1; i < line.size(); ++i) {
    if (line[i] == '|' && line[i - 1] != '\\') {
      cells.push_back(trimmed(cell));
      cell.clear();
    } else {
      cell += line[i];
    }
  }
  return cells;
}

// The lines of a page that are no code.
std::vector<std::string> prose_of(const std::string& page) {
  std::vector<std::string> prose;
  bool code = false;
  for (const std::string& line : lines_of(page)) {
    if (is_fence(line)) code = !code;
    if (!code && !is_fence(line)) prose.push_back(line);
  }
  return prose;
}

std::vector<std::string> long_cells(const std::string& page) {
  std::vector<std::string> found;
  for (const std::string& line : prose_of(page)) {
    if (!line.starts_with("|")) continue;
    for (const std::string& cell : cells_of(line)) {
      if (characters(cell) > kMostCharacters) found.push_back(cell);
    }
  }
  return found;
}

// A row of a table as text: commas stand between its cells.
std::string row_text(const std::string& line) {
  std::string text;
  for (const std::string& cell : cells_of(line)) text += (text.empty() ? "" : ", ") + cell;
  return text;
}

// A page in sentences, lower case. A sentence of prose may reach over lines; rows, points and headings begin anew.
std::vector<std::string> sentences_of(const std::string& page) {
  std::string text;
  for (const std::string& line : prose_of(page)) {
    if (line.starts_with("|")) {
      text += ". " + row_text(line) + ". ";
    } else if (line.empty() || line.starts_with("* ") || line.starts_with("- ") || line.starts_with("#")) {
      text += ". " + line + " ";
    } else {
      text += trimmed(line) + " ";
    }
  }
  std::vector<std::string> sentences(1);
  for (size_t i = 0; i < text.size(); ++i) {
    const bool ends =
        std::string(".;!?").find(text[i]) != std::string::npos && i + 1 < text.size() && text[i + 1] == ' ';
    if (ends) {
      sentences.emplace_back();
    } else {
      sentences.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(text[i])));
    }
  }
  return sentences;
}

// The few sentences of a page that call anything missing.
std::vector<std::string> doubts_of(const std::string& page) {
  static constexpr std::array kWords = {"there is no", "there are no", " yet",     "not there",      "not run",
                                        "missing",     "not exist",    "not work", "not implemented"};
  std::vector<std::string> doubts = sentences_of(page);
  std::erase_if(doubts, [](const std::string& sentence) {
    return std::none_of(kWords.begin(), kWords.end(),
                        [&](const char* word) { return sentence.find(word) != std::string::npos; });
  });
  return doubts;
}

// A feature, the words by which pages speak of it, and the row of docs/status.md that tells its state.
struct Feature {
  std::string row;    // part of the row's first cell
  std::string words;  // a regular expression, lower case
};

const std::vector<Feature>& features() {
  static const std::vector<Feature> kFeatures = {
      {"Tensor parallelism with the engine", "tensor[ -]parallel(ism)?"},
      {"Pipelines of seven schedules", "pipelines?"},
      {"`ds::DistributedDataParallel`", "`?ddp`?|distributeddataparallel|`?join(\\(\\))?`?"},
      {"`ds::fully_shard`", "`?fully_shard`?|fsdp"},
      {"FP8 for Linear layers", "`?fp8`?"},
      {"SyncBatchNorm", "syncbatchnorm|`?sync_batchnorm`?"},
      {"Activation checkpointing of any", "activation checkpointing"},
      {"Sparse attention", "sparse attention"},
      {"Elastic training", "elastic training"},
      {"Optimizers of the program", "client optimizers?|optimizers of the program"},
      {"Any stage and number of ranks", "checkpoints"},
      {"GPUDirect Storage", "gpudirect storage|`?aio\\.use_gds`?"},
      {"Communication log", "`?comms_logger`?|communication log"},
      {"Flops profiler", "`?flops_profiler`?|flops profiler"},
      {"`GradScaler`", "`?gradscaler`?"},
      {"`sparse_gradients`", "`?sparse_gradients`?"},
      {"`compression_training`", "`?compression_training`?"},
      {"CUDA: NCCL communicators", "nccl"},
  };
  return kFeatures;
}

// The state of the feature's row; empty when docs/status.md has no such row.
std::string state_of(const std::string& status, const std::string& row) {
  for (const std::string& line : prose_of(status)) {
    if (!line.starts_with("|")) continue;
    const std::vector<std::string> cells = cells_of(line);
    if (cells.size() >= 2 && cells[0].find(row) != std::string::npos) return cells[1];
  }
  return "";
}

bool is_working(const std::string& state) { return !state.empty() && !state.starts_with("refused"); }

// "there is no NAME", "no NAME yet", "NAME is not there", "NAME: not run", "NAME has not run": what was true before the
// feature was made.
std::vector<std::string> stale_among(const std::vector<std::string>& doubts, const std::string& words) {
  const std::string name = "(^|[^a-z_])(" + words + ")";
  const std::regex stale("there (is|are) no" + name + "(?![a-z_ ]* that)|(^|[^a-z])no" + name + " yet|" + name +
                         "( is| are|,|:)? (not there|not yet|not run|not implemented|missing)|" + name +
                         " (has|have|does|do) not (run|exist|work)|not (there|run) yet[^a-z]*" + name);
  std::vector<std::string> found;
  for (const std::string& sentence : doubts) {
    if (std::regex_search(sentence, stale)) found.push_back(trimmed(sentence));
  }
  return found;
}

std::vector<std::string> pages() {
  std::vector<std::string> names = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md",
                                    "examples/README.md"};
  for (const auto& entry : fs::directory_iterator(fs::path(DS_SOURCE_DIR) / "docs")) {
    if (entry.path().extension() == ".md") names.push_back("docs/" + entry.path().filename().string());
  }
  return names;
}

TEST(Docs, NoCellOfATableIsLong) {
  int tables = 0;
  for (const std::string& name : pages()) {
    const std::string page = read_page(name);
    tables += page.find("\n|---") != std::string::npos ? 1 : 0;
    for (const std::string& cell : long_cells(page)) {
      ADD_FAILURE() << name << ": a cell of " << characters(cell) << " characters, at most " << kMostCharacters
                    << "; move the detail below the table: " << cell;
    }
  }
  EXPECT_GT(tables, 20) << "the test must see the pages";
}

TEST(Docs, TheChangelogIsShort) {
  const std::vector<std::string> changelog = lines_of(read_page("CHANGELOG.md"));
  EXPECT_GT(changelog.size(), 50U) << "the test must see the page";
  EXPECT_LE(changelog.size(), kMostChangelogLines) << "one line for each change; merge what belongs together";
  std::set<std::string> headings;
  for (const std::string& line : changelog) {
    if (line.starts_with("### ")) headings.insert(line.substr(4));
    EXPECT_FALSE(line.starts_with("  ")) << "a change has one line: " << line;
  }
  EXPECT_EQ(headings, (std::set<std::string>{"Added", "Changed", "Fixed"}));
}

TEST(Docs, NoPageCallsMissingWhatWorks) {
  std::map<std::string, std::vector<std::string>> doubts;
  size_t sentences = 0;
  for (const std::string& name : pages()) {
    doubts[name] = doubts_of(read_page(name));
    sentences += doubts[name].size();
  }
  EXPECT_GT(sentences, 20U) << "the test must see the pages";
  const std::string status = read_page("docs/status.md");
  for (const Feature& feature : features()) {
    const std::string state = state_of(status, feature.row);
    ASSERT_FALSE(state.empty()) << "docs/status.md has no row '" << feature.row << "': change it here too";
    if (!is_working(state)) continue;
    for (const auto& [name, said] : doubts) {
      for (const std::string& sentence : stale_among(said, feature.words)) {
        ADD_FAILURE() << name << " calls missing what docs/status.md calls '" << state << "': " << sentence;
      }
    }
  }
}

TEST(Docs, EveryStateOfAFeatureIsOneOfTheLegend) {
  int rows = 0;
  for (const std::string& line : prose_of(read_page("docs/status.md"))) {
    const std::vector<std::string> cells = line.starts_with("|") ? cells_of(line) : std::vector<std::string>{};
    if (cells.size() != 3 || cells[1] == "state" || cells[1].starts_with("---")) continue;
    ++rows;
    EXPECT_TRUE(cells[1].starts_with("works") || cells[1].starts_with("simulated GPU") ||
                cells[1].starts_with("one GPU") || cells[1].starts_with("refused"))
        << cells[0] << ": " << cells[1];
  }
  EXPECT_GT(rows, 40) << "the test must see the rows";
}

TEST(Docs, PlantedLongCellsAreFound) {
  const std::string word(kMostCharacters + 1, 'x');
  EXPECT_EQ(long_cells("| a | " + word + " |\n").size(), 1U);
  EXPECT_EQ(long_cells("| " + word + " | b |\n| c | " + word + " |\n").size(), 2U);
  EXPECT_TRUE(long_cells("| a | " + word.substr(1) + " |\n").empty());
  EXPECT_TRUE(long_cells(word + "\n").empty());                          // prose
  EXPECT_TRUE(long_cells("```\n| " + word + " |\n```\n").empty());       // code
  EXPECT_EQ(long_cells("| a\\|" + word.substr(2) + " |\n").size(), 1U);  // a bar that belongs to the cell
}

TEST(Docs, PlantedStaleSentencesAreFound) {
  const std::string tensor = "tensor[ -]parallel(ism)?";
  for (const char* stale :
       {"no effect: there is no tensor parallelism, and more", "Here there is no\ntensor parallelism.",
        "| tensor parallelism | not there |", "Tensor parallelism is not there.", "Tensor parallelism has not run yet.",
        "| a | Tensor parallel: x |\n\nBut tensor parallelism, not yet.", "There is no tensor parallelism yet.",
        "* tensor parallelism: not run yet"}) {
    EXPECT_FALSE(stale_among(doubts_of(stale), tensor).empty()) << stale;
  }
  for (const char* sound :
       {"Tensor parallelism is refused in pipelines.", "A rank that is not there is named. Tensor parallelism works.",
        "```\nthere is no tensor parallelism\n```\n",
        "Weights that are not there, with tensor parallelism, are errors.",
        "| sequences | not there |\n| tensor parallelism | works |\n"}) {
    EXPECT_TRUE(stale_among(doubts_of(sound), tensor).empty()) << sound;
  }
  EXPECT_FALSE(stale_among(doubts_of("There is no `Join`. Give all ranks as many."), "`?join(\\(\\))?`?").empty());
}

TEST(Docs, StatesAreRead) {
  const std::string status =
      "| feature | state | shown by |\n|---|---|---|\n| Here | works | a |\n| There | refused | b |\n";
  EXPECT_TRUE(is_working(state_of(status, "Here")));
  EXPECT_FALSE(is_working(state_of(status, "There")));
  EXPECT_EQ(state_of(status, "Nowhere"), "");
}

}  // namespace
}  // namespace ds::docs
