// How checkpoints appear and disappear in a save_dir, and what is left where a job died on the way.
#include "checkpoint/tag_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/export.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/index.h"
#include "core/check.h"
#include "core/unique_fd.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;
using testing::UnorderedElementsAre;

constexpr const char* kRun = "0123456789abcdef";

class TagFolder : public testing::Test {
 protected:
  // A whole checkpoint of one step, which holds that number; keep_last of `run` counts it.
  void make(const std::string& tag, int64_t step, const std::string& run = kRun) {
    MemorySource source;
    source.add("weights/step", torch::tensor(step, torch::kLong));
    source.mutable_state().global_steps = step;
    source.mutable_state().run = run;
    source.mutable_state().keep_last_tag = tag;
    rewrite(source, tag_path(dir_, tag));
  }
  int64_t step_of(const std::string& tag) {
    return open_folder(tag_path(dir_, tag))->tensor("weights/step").item<int64_t>();
  }
  // A complete folder that is not published.
  TagSave make_incomplete(const std::string& tag, int64_t step) {
    make("made", step);
    const TagSave save = begin(tag);
    for (const auto& entry : fs::directory_iterator(tag_path(dir_, "made"))) {
      fs::copy(entry.path(), fs::path(save.incomplete) / entry.path().filename());
    }
    fs::remove_all(tag_path(dir_, "made"));
    return save;
  }
  TagSave begin(const std::string& tag) const {
    TagSave save = new_save(dir_, tag);
    begin_tag(save);
    return save;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(dir_)) all.push_back(entry.path().filename());
    return all;
  }
  std::vector<std::string> whole() const {
    std::vector<std::string> tags;
    for (const TagInfo& tag : whole_tags(dir_)) tags.push_back(tag.tag);
    return tags;
  }
  void put(const std::string& name, const std::string& text) const { std::ofstream(fs::path(dir_) / name) << text; }

  test::ScratchFolder folder_;
  std::string dir_ = folder_ / "checkpoints";
};

TEST_F(TagFolder, NamesThatAreNoTags) {
  for (const char* tag : {"", ".", "..", ".hidden", "a/b", "/abs", "latest", "two\nlines"}) {
    EXPECT_THAT([&] { require_tag(tag); }, ThrowsMessage<UsageError>(HasSubstr(cat('"', tag, '"')))) << tag;
    EXPECT_THROW(begin(tag), UsageError);
  }
  EXPECT_FALSE(fs::exists(dir_));
  for (const char* tag : {"a", "global_step10", "with space", "trailing ", "ümläut", "a.incomplete", "index.json",
                          "latest2", "*", "-rf", "%s%n"}) {
    make(tag, 4);
    EXPECT_EQ(step_of(tag), 4) << tag;
    EXPECT_EQ(read_latest(dir_), tag);
    EXPECT_THAT(whole(), testing::Contains(std::string(tag)));
  }
  EXPECT_THROW(make(std::string(300, 'x'), 1), IoError);
}

TEST_F(TagFolder, ALatestThatIsNoNameIsNotReadWhole) {
  make("tag", 1);
  fs::resize_file(fs::path(dir_) / "latest", uint64_t{1} << 40);
  EXPECT_THAT([&] { read_latest(dir_); }, ThrowsMessage<IoError>(HasSubstr("expected at most 4096 bytes")));
}

TEST_F(TagFolder, AnOlderTagStaysUntilTheNewOneIsWhole) {
  make("tag", 1);
  abandon_tag(begin("tag"));
  EXPECT_THAT(names(), UnorderedElementsAre("tag", "latest"));
  EXPECT_EQ(step_of("tag"), 1);
  const TagSave save = make_incomplete("tag", 2);
  EXPECT_EQ(step_of("tag"), 1);
  EXPECT_THAT(whole(), ElementsAre("tag"));
  publish_tag(save);
  EXPECT_EQ(step_of("tag"), 2);
  EXPECT_THAT(names(), UnorderedElementsAre("tag", "latest"));
  abandon_tag(save);  // nothing to remove
  EXPECT_EQ(step_of("tag"), 2);
}

TEST_F(TagFolder, PublishingWithoutBeginning) {
  make("tag", 1);
  EXPECT_THROW(publish_tag(new_save(dir_, "tag")), IoError);
  EXPECT_EQ(step_of("tag"), 1);
  EXPECT_THROW(publish_tag(new_save(dir_, "other")), IoError);
}

// A job that died while it wrote, with any part of the files.
TEST_F(TagFolder, WhatADeadJobLeftIsNoCheckpointAndInNobodysWay) {
  make("old", 1);
  make_incomplete("dead", 7);
  begin("empty");
  EXPECT_THAT(whole(), ElementsAre("old"));
  const TagSave again = begin("dead");
  EXPECT_TRUE(fs::is_empty(again.incomplete));
  EXPECT_THAT(incomplete_paths(dir_, "dead"), ElementsAre(again.incomplete));
  // Also where there is no folder but a file.
  std::ofstream(new_save(dir_, "file").incomplete) << "x";
  const TagSave file = begin("file");
  EXPECT_THAT(incomplete_paths(dir_, "file"), ElementsAre(file.incomplete));
  make("new", 2);
  keep_last_tags(dir_, 5, "new", kRun);
  EXPECT_THAT(names(), UnorderedElementsAre("old", "new", "latest"));
}

// What still writes under the name of an earlier save, or has it in a cache, comes into nobody's way.
TEST_F(TagFolder, EachSaveHasAFolderOfItsOwn) {
  const TagSave first = make_incomplete("tag", 1);
  publish_tag(first);
  const TagSave second = begin("tag");
  EXPECT_NE(first.incomplete, second.incomplete);
  EXPECT_FALSE(fs::exists(first.incomplete));
  // Those of tags with similar names are others.
  const std::vector<std::string> others = {"ta", "tag.0123456789abcdef", "tag.", "tagg", "ag"};
  for (const std::string& tag : others) begin(tag);
  EXPECT_THAT(incomplete_paths(dir_, "tag"), ElementsAre(second.incomplete));
  const TagSave third = begin("tag");
  EXPECT_FALSE(fs::exists(second.incomplete));
  EXPECT_THAT(incomplete_paths(dir_, "tag"), ElementsAre(third.incomplete));
  for (const std::string& tag : others) EXPECT_EQ(incomplete_paths(dir_, tag).size(), 1U) << tag;
}

// Where two folders cannot be exchanged, the older one has another name for a moment.
TEST_F(TagFolder, ADeathBetweenTheTwoRenames) {
  make("tag", 1);
  make_incomplete("tag", 2);
  fs::rename(tag_path(dir_, "tag"), fs::path(dir_) / ".tag.replaced");
  EXPECT_THAT(whole(), ElementsAre("tag"));  // put back
  EXPECT_EQ(step_of("tag"), 1);
  EXPECT_FALSE(fs::exists(fs::path(dir_) / ".tag.replaced"));
  make("tag", 3);
  EXPECT_EQ(step_of("tag"), 3);
}

TEST_F(TagFolder, ADeathAfterTheSecondRename) {
  make("tag", 1);
  fs::rename(tag_path(dir_, "tag"), fs::path(dir_) / ".tag.replaced");
  fs::rename(make_incomplete("tag", 2).incomplete, tag_path(dir_, "tag"));
  EXPECT_THAT(whole(), ElementsAre("tag"));
  EXPECT_EQ(step_of("tag"), 2);
  keep_last_tags(dir_, 1, "tag", kRun);
  EXPECT_THAT(names(), UnorderedElementsAre("tag", "latest"));  // nothing stays for ever
}

// The exchange was done, the older one not yet removed.
TEST_F(TagFolder, ADeathAfterTheExchange) {
  make("tag", 2);
  const TagSave older = make_incomplete("other", 1);
  fs::copy(older.incomplete, new_save(dir_, "tag").incomplete);  // without the lock of this process
  abandon_tag(older);
  EXPECT_THAT(whole(), ElementsAre("tag"));
  EXPECT_EQ(step_of("tag"), 2);
  make("tag", 3);
  EXPECT_EQ(step_of("tag"), 3);
  EXPECT_THAT(names(), UnorderedElementsAre("tag", "latest"));
}

TEST_F(TagFolder, ADamagedIndexIsNotWhole) {
  make("one", 1);
  make("two", 2);
  make("three", 3);
  fs::resize_file(fs::path(tag_path(dir_, "two")) / kIndexName, 100);
  fs::remove(fs::path(tag_path(dir_, "three")) / kIndexName);
  fs::create_directory(fs::path(tag_path(dir_, "three")) / kIndexName);
  fs::create_directory_symlink("around", fs::path(dir_) / "around");  // a circle
  put("notes.txt", "mine");
  fs::create_directory(fs::path(dir_) / "runs");
  EXPECT_THAT(whole(), ElementsAre("one"));
}

TEST_F(TagFolder, LatestStepFirst) {
  make("b", 10);
  make("a", 9);
  make("c", 100);
  make("d", 10);
  EXPECT_THAT(whole(), ElementsAre("c", "b", "d", "a"));
  EXPECT_THAT(whole_tags(folder_ / "nowhere"), IsEmpty());
}

TEST_F(TagFolder, KeepLast) {
  for (int64_t step = 1; step <= 6; ++step) make(cat("step", step), step);
  put("notes.txt", "mine");
  fs::create_directory(fs::path(dir_) / "runs");
  keep_last_tags(dir_, 3, "step6", kRun);
  EXPECT_THAT(whole(), ElementsAre("step6", "step5", "step4"));
  // The one just written stays though it is older than others, and so does the one that `latest` names.
  make("again", 2);
  write_latest(dir_, "step4");
  keep_last_tags(dir_, 2, "again", kRun);
  EXPECT_THAT(whole(), ElementsAre("step6", "step4", "again"));
  keep_last_tags(dir_, 1, "again", kRun);
  EXPECT_THAT(whole(), ElementsAre("step4", "again"));
  EXPECT_THAT(names(), UnorderedElementsAre("step4", "again", "latest", "notes.txt", "runs"));
  keep_last_tags(dir_, 100, "again", kRun);
  EXPECT_THAT(whole(), ElementsAre("step4", "again"));
}

TEST_F(TagFolder, KeepLastRemovesWhatItsRunHasSavedWithIt) {
  for (int64_t step = 1; step <= 4; ++step) make(cat("step", step), step);
  make("other_run", 1, "fedcba9876543210");
  make("no_run", 1, "");
  fs::copy(tag_path(dir_, "step1"), tag_path(dir_, "best"), fs::copy_options::recursive);
  EXPECT_THAT(keep_last_tags(dir_, 2, "step4", kRun), ElementsAre("step2", "step1"));
  EXPECT_THAT(whole(), UnorderedElementsAre("step4", "step3", "other_run", "no_run", "best"));
  EXPECT_THAT(keep_last_tags(dir_, 1, "step4", ""), IsEmpty());
}

TEST_F(TagFolder, WhatAnotherOwnerWritesStays) {
  const TagOwner one;
  {
    const TagOwner other;
    other.claim(dir_, "theirs");
    const TagSave theirs = begin("theirs");
    const TagSave dead = begin("dead");
    make("mine", 1);
    one.claim(dir_, "mine");
    keep_last_tags(dir_, 1, "mine", kRun);
    EXPECT_TRUE(fs::exists(theirs.incomplete));
    EXPECT_FALSE(fs::exists(dead.incomplete));
    EXPECT_THAT(
        [&] { one.claim(folder_ / "./checkpoints", "theirs"); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("theirs"), HasSubstr("another engine"), HasSubstr("save_dir"))));
    EXPECT_THROW(other.claim(dir_, "mine"), UsageError);
    one.claim(dir_, "mine");
  }
  one.claim(dir_, "theirs");  // the other one has ended
}

// Processes that are no ranks of one job; the lock of another one lies on a descriptor that this one has not opened.
TEST_F(TagFolder, WhatAnotherProcessWritesIsNeitherRemovedNorReplaced) {
  make("mine", 1);
  const std::string theirs = new_save(dir_, "theirs").incomplete;
  fs::create_directory(theirs);
  UniqueFd descriptor(::open(theirs.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(descriptor.get(), LOCK_EX | LOCK_NB), 0);
  keep_last_tags(dir_, 1, "mine", kRun);
  EXPECT_TRUE(fs::exists(theirs));
  EXPECT_THAT([&] { begin("theirs"); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("\"theirs\" in " + dir_), HasSubstr("writes it at the moment"),
                                              HasSubstr("a save_dir or tags of its own"))));
  EXPECT_THAT(incomplete_paths(dir_, "theirs"), ElementsAre(theirs));
  abandon_tag(begin("theirs_too"));
  descriptor.reset();  // it has died
  abandon_tag(begin("theirs"));
  EXPECT_FALSE(fs::exists(theirs));
}

// So that other processes see it as in the test above.
TEST_F(TagFolder, AFolderIsLockedUntilItIsPublishedOrAbandoned) {
  const auto is_locked = [](const std::string& path) {
    const UniqueFd descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    EXPECT_TRUE(descriptor.valid()) << path;
    return ::flock(descriptor.get(), LOCK_EX | LOCK_NB) != 0;
  };
  const TagSave save = make_incomplete("tag", 1);
  EXPECT_TRUE(is_locked(save.incomplete));
  publish_tag(save);
  EXPECT_FALSE(is_locked(tag_path(dir_, "tag")));
  const TagSave next = make_incomplete("tag", 2);
  publish_tag(next);  // in exchange for the older one
  EXPECT_FALSE(is_locked(tag_path(dir_, "tag")));
}

TEST_F(TagFolder, Latest) {
  EXPECT_EQ(read_latest(dir_), std::nullopt);
  fs::create_directories(dir_);
  EXPECT_EQ(read_latest(dir_), std::nullopt);
  write_latest(dir_, "tag");
  EXPECT_EQ(read_latest(dir_), "tag");
  write_latest(dir_, "other");
  EXPECT_EQ(read_latest(dir_), "other");
  for (const char* text : {"by hand\n", "by hand\r\n", "by hand"}) {
    put("latest", text);
    EXPECT_EQ(read_latest(dir_), "by hand");
  }
  put("latest", "");
  EXPECT_EQ(read_latest(dir_), "");
}

// A folder of the user's own under that name would be lost.
TEST_F(TagFolder, WhatIsNoCheckpointIsNotReplaced) {
  fs::create_directories(fs::path(dir_) / "src");
  put("src/main.cc", "int main() {}");
  put("notes", "mine");
  for (const char* tag : {"src", "notes"}) {
    EXPECT_THAT([&] { make(tag, 1); },
                ThrowsMessage<IoError>(AllOf(HasSubstr(tag), HasSubstr("no checkpoint"), HasSubstr("another tag"))));
  }
  EXPECT_TRUE(fs::exists(fs::path(dir_) / "src/main.cc"));
  EXPECT_TRUE(fs::is_regular_file(fs::path(dir_) / "notes"));
  fs::create_directory(fs::path(dir_) / "empty");
  make("empty", 1);
  EXPECT_EQ(step_of("empty"), 1);
  // A checkpoint that is damaged may be.
  fs::resize_file(fs::path(tag_path(dir_, "empty")) / kIndexName, 10);
  make("empty", 2);
  EXPECT_EQ(step_of("empty"), 2);
}

TEST_F(TagFolder, LinksThatLeadNowhereAreNamed) {
  fs::create_directories(dir_);
  fs::create_symlink("/no/such/disk", fs::path(dir_) / "link");
  const auto says = ThrowsMessage<IoError>(HasSubstr("link is a symbolic link to /no/such/disk, which does not exist"));
  EXPECT_THAT([&] { begin_tag(new_save(dir_ + "/link", "tag")); }, says);
  EXPECT_THAT([&] { begin_tag(new_save(dir_ + "/link/deeper", "tag")); }, says);
  EXPECT_THAT([&] { begin_tag(new_save(dir_, "link")); }, says);
}

TEST_F(TagFolder, AnAddressIsNoFolder) {
  for (const char* address : {"s3://bucket/run", "gs://bucket", "hdfs://host:9000/run", "file:///run"}) {
    EXPECT_THAT([&] { require_folder_name(address, "save_checkpoint"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("save_checkpoint: expected a folder"), HasSubstr(address))));
  }
  for (const char* folder : {"run", "/run", ".", "a:b", "runs/s3://x", "c:/run"}) {
    EXPECT_NO_THROW(require_folder_name(folder, "save_checkpoint")) << folder;
  }
}

// Whatever editor wrote it.
TEST_F(TagFolder, LatestByHand) {
  make("tag", 1);
  put("latest", "\xEF\xBB\xBFtag\r\n");
  EXPECT_EQ(read_latest(dir_), "tag");
}

TEST_F(TagFolder, FoldersThatCannotBeMade) {
  std::ofstream(dir_) << "a file";
  EXPECT_THAT([&] { begin_tag(new_save(dir_, "tag")); }, ThrowsMessage<IoError>(HasSubstr(dir_)));
  EXPECT_THAT([&] { begin_tag(new_save(dir_ + "/deeper", "tag")); }, ThrowsMessage<IoError>(HasSubstr(dir_)));
  EXPECT_THAT(whole_tags(dir_), IsEmpty());
}

}  // namespace
}  // namespace ds::checkpoint
