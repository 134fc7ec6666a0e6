// The index of a checkpoint: what is written is read back, and nothing else is taken for an index.
#include "checkpoint/index.h"

#include <cmath>
#include <functional>
#include <string>

#include "checkpoint/block_checksum.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

Index sample_index() {
  Index index;
  index.state.global_steps = 7;
  index.state.global_samples = 84;
  index.state.micro_steps = 14;
  index.state.skipped_steps = 2;
  index.state.world_size = 2;
  index.state.zero_stage = 3;
  index.state.precision = "bfloat16";
  index.state.optimizer = OptimizerState{
      .type = "AdamW",
      .step_count = 5,
      .groups = {{.lr = 0.1, .weight_decay = 1e-300, .beta1 = 1.0 / 3.0, .beta2 = 0.999, .momentum = -0.0, .eps = 1e-8},
                 {}}};
  index.state.loss_scaler = optimizers::LossScalerState{
      .scale = 65536.0, .iteration = 9, .last_overflow_iteration = -1, .remaining_hysteresis = 2};
  index.state.lr_iteration = -1;
  index.state.data = DataPosition{.epoch = 3, .next_sample = 1LL << 40, .seed = ~0ULL};
  index.state.config = "{\"a\": 1} // as it was";
  index.state.client_state = {{"nested", {1, 2.5, nullptr, "ü\n\"", {{"k", true}}}}, {"big", INT64_MIN}};
  index.aliases = {{"head", "embed"}};
  index.tensors = {{"weights/a", {.dtype = at::kFloat, .sizes = {2, 5}}},
                   {"weights/b", {.dtype = at::kBFloat16, .sizes = {}, .frozen = true}},
                   {"buffers/none", {.dtype = at::kLong, .sizes = {4, 0}}}};
  FileRecord& first = index.files["weights-00000-of-00002.safetensors"];
  first = {.bytes = 200, .header_bytes = 64, .header_checksum = 0xfedcba9876543210, .pieces = {}};
  first.pieces.push_back({"weights/a", "a@0", 0, 6, 64, {1}});
  first.pieces.push_back({"weights/b", "b", 0, 1, 88, {~0ULL}});
  first.pieces.push_back({"buffers/none", "none", 0, 0, 200, {}});
  FileRecord& second = index.files["weights-00001-of-00002.safetensors"];
  second = {.bytes = 80, .header_bytes = 64, .header_checksum = 0, .pieces = {}};
  second.pieces.push_back({"weights/a", "a@6", 6, 4, 64, {3}});
  return index;
}

Index reread(const Index& index) { return index_from(to_text(index), "here"); }

TEST(Index, ReadsBackWhatWasWritten) {
  const Index index = sample_index();
  const Index found = reread(index);
  EXPECT_EQ(to_text(found), to_text(index));
  EXPECT_EQ(found.tensors, index.tensors);
  EXPECT_EQ(found.aliases, index.aliases);
  EXPECT_EQ(found.state.client_state, index.state.client_state);
  EXPECT_EQ(found.state.config, index.state.config);
  EXPECT_EQ(found.state.data, index.state.data);
  EXPECT_EQ(found.state.loss_scaler, index.state.loss_scaler);
  EXPECT_EQ(found.state.lr_iteration, -1);
  ASSERT_EQ(found.state.optimizer->groups.size(), 2U);
  EXPECT_EQ(found.state.optimizer->groups[0].beta1, 1.0 / 3.0);
  EXPECT_EQ(found.state.optimizer->groups[0].weight_decay, 1e-300);
  const FileRecord& file = found.files.at("weights-00000-of-00002.safetensors");
  EXPECT_EQ(file.header_checksum, 0xfedcba9876543210);
  EXPECT_EQ(file.pieces[1].checksums, (std::vector<uint64_t>{~0ULL}));
  EXPECT_EQ(file.pieces[0].key, "a@0");
}

TEST(Index, WhatIsNotThereStaysAway) {
  Index index = sample_index();
  index.state.optimizer.reset();
  index.state.loss_scaler.reset();
  index.state.lr_iteration.reset();
  index.state.data.reset();
  const Index found = reread(index);
  EXPECT_FALSE(found.state.optimizer.has_value());
  EXPECT_FALSE(found.state.loss_scaler.has_value());
  EXPECT_FALSE(found.state.lr_iteration.has_value());
  EXPECT_FALSE(found.state.data.has_value());
}

// Layout of JSON between tokens carries nothing; all else is an error.
TEST(Index, EveryChangedByteIsFoundOrMeansNothing) {
  const std::string text = to_text(sample_index());
  int64_t meaningless = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    for (const int bits : {0x01, 0x02, 0x03, 0x10, 0x20, 0x80, 0xff}) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      try {
        EXPECT_EQ(to_text(index_from(damaged, "here")), text) << "byte " << at << " of " << text;
        ++meaningless;
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), StartsWith("here: "));
      }
    }
  }
  EXPECT_LT(meaningless, 8);
}

TEST(Index, EveryTruncationIsFoundOrMeansNothing) {
  const std::string text = to_text(sample_index());
  for (size_t bytes = 0; bytes + 1 < text.size(); ++bytes) {
    EXPECT_THROW(index_from(text.substr(0, bytes), "here"), IoError) << bytes;
  }
  EXPECT_EQ(to_text(index_from(text.substr(0, text.size() - 1), "here")), text);  // the line's end
  EXPECT_THROW(index_from(text + "x", "here"), IoError);
  EXPECT_THROW(index_from(text + text, "here"), IoError);
}

TEST(Index, OtherFormatsAndVersionsAreNamed) {
  std::string text = to_text(sample_index());
  const size_t version = text.find("\"version\":1");
  text.replace(version, 11, "\"version\":3");
  EXPECT_THAT([&] { index_from(text, "here"); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("expected version 1 or 2, found 3"), HasSubstr("here"))));
  for (const char* other : {"", "{}", "[]", "null", "7", "{\"format\":\"dsengine checkpoint\"}", "\xff\xfe"}) {
    EXPECT_THAT([&] { index_from(other, "here"); }, ThrowsMessage<IoError>(HasSubstr("here"))) << other;
  }
  const std::string deep(3'000'000, '[');
  EXPECT_THROW(index_from(R"({"format":"dsengine checkpoint","version":1,"checksum":"","content":)" + deep +
                              std::string(deep.size(), ']') + "}",
                          "here"),
               IoError);
}

// --- contents with a checksum that fits ------------------------------------------------------------------------------

json content_of(const Index& index) { return json::parse(to_text(index)).at("content"); }

// What an index with a changed content is refused with.
std::string refusal(const std::function<void(json&)>& change) {
  json content = content_of(sample_index());
  change(content);
  try {
    index_from(sealed(content), "here");
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), StartsWith("here"));
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << content.dump(1);
  return {};
}

json& piece(json& content, const char* rank, size_t number) {
  return content["files"][cat("weights-", rank, "-of-00002.safetensors")]["pieces"][number];
}

TEST(Index, PiecesCoverEveryTensorExactlyOnce) {
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[2] = 5; }),
              AllOf(HasSubstr("weights/a"), HasSubstr("element 5"), HasSubstr("twice")));
  EXPECT_THAT(refusal([](json& c) {
                piece(c, "00001", 0)[2] = 7;
                piece(c, "00001", 0)[3] = 3;
              }),
              AllOf(HasSubstr("weights/a"), HasSubstr("element 6"), HasSubstr("in no file")));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[3] = 3; }),
              AllOf(HasSubstr("weights/a"), HasSubstr("from 9 to 10")));
  EXPECT_THAT(refusal([](json& c) { c["files"].erase("weights-00001-of-00002.safetensors"); }),
              AllOf(HasSubstr("weights/a"), HasSubstr("from 6 to 10")));
  EXPECT_THAT(refusal([](json& c) {
                json& pieces = c["files"]["weights-00000-of-00002.safetensors"]["pieces"];
                pieces.push_back(pieces[1]);
              }),
              AllOf(HasSubstr("weights/b"), HasSubstr("twice")));
}

TEST(Index, PiecesLieInTheirTensorAndFile) {
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[2] = -1; }), HasSubstr("weights/a"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[3] = -4; }), HasSubstr("weights/a"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[2] = INT64_MAX; }), HasSubstr("weights/a"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[4] = 66; }), HasSubstr("ends after the file"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[4] = 8; }), HasSubstr("weights/a"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[4] = UINT64_MAX; }), HasSubstr("ends after the file"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[5] = ""; }), HasSubstr("0 checksums"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[5] = "0123"; }), HasSubstr("16 hexadecimal digits"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[5] = "000000000000000g"; }), HasSubstr("hexadecimal"));
  EXPECT_THAT(refusal([](json& c) { piece(c, "00001", 0)[0] = "weights/c"; }), HasSubstr("weights/c"));
  EXPECT_THAT(refusal([](json& c) { c["tensors"].erase("weights/b"); }), HasSubstr("weights/b"));
  EXPECT_THAT(refusal([](json& c) { c["files"]["weights-00001-of-00002.safetensors"]["header_bytes"] = 1ULL << 60; }),
              HasSubstr("weights-00001"));
}

// Also of a file without pieces: its header would be read into memory.
TEST(Index, AHeaderIsNoLongerThanItsFile) {
  EXPECT_THAT(
      refusal([](json& c) {
        c["files"]["empty"] = {
            {"bytes", 8}, {"header_bytes", 1ULL << 60}, {"header_checksum", to_hex(0)}, {"pieces", json::array()}};
      }),
      HasSubstr("empty"));
}

TEST(Index, TensorsAreTensors) {
  EXPECT_THAT(refusal([](json& c) { c["tensors"]["weights/b"]["dtype"] = "F8"; }), HasSubstr("F8"));
  EXPECT_THAT(refusal([](json& c) { c["tensors"]["weights/b"]["shape"] = {-1}; }), HasSubstr("[-1]"));
  EXPECT_THAT(refusal([](json& c) {
                c["tensors"]["weights/b"]["shape"] = {1LL << 40, 1LL << 40};
              }),
              HasSubstr("weights/b"));
  EXPECT_THAT(refusal([](json& c) {
                c["tensors"]["buffers/none"]["shape"] = {0, 1LL << 40, 1LL << 40};
              }),
              HasSubstr("buffers/none"));
  EXPECT_THAT(refusal([](json& c) { c["tensors"]["weights/b"]["shape"] = "none"; }), HasSubstr("here"));
  EXPECT_THAT(refusal([](json& c) { c["tensors"]["weights/b"].erase("shape"); }), HasSubstr("shape"));
}

// What nlohmann::json would convert, with an undefined result, or cut off.
TEST(Index, NumbersAreIntegers) {
  for (const json& odd : {json(1e300), json(2.5), json("2"), json(true), json(UINT64_MAX)}) {
    EXPECT_THAT(refusal([&](json& c) { c["tensors"]["weights/a"]["shape"] = {2, odd}; }), HasSubstr("integer")) << odd;
    EXPECT_THAT(refusal([&](json& c) { c["files"]["weights-00001-of-00002.safetensors"]["pieces"][0][2] = odd; }),
                HasSubstr("integer"))
        << odd;
    EXPECT_THAT(refusal([&](json& c) { c["state"]["global_steps"] = odd; }), HasSubstr("integer")) << odd;
    EXPECT_THAT(refusal([&](json& c) { c["state"]["world_size"] = odd; }), HasSubstr("integer")) << odd;
  }
}

TEST(Index, FilesHaveNoFolders) {
  for (const std::string& name :
       {std::string(), std::string("../weights"), std::string("a/b"), std::string("/etc/passwd"), std::string(".."),
        std::string("."), std::string("a\0b", 3)}) {
    EXPECT_THAT(refusal([&](json& c) { c["files"][name] = c["files"]["weights-00001-of-00002.safetensors"]; }),
                HasSubstr("without folders"));
  }
}

TEST(Index, EveryKeyIsNeeded) {
  const json content = content_of(sample_index());
  for (const auto& [key, value] : content.items()) {
    EXPECT_THAT(refusal([&, &erased = key](json& c) { c.erase(erased); }), HasSubstr(key));
  }
  for (const char* key : {"global_steps", "global_samples", "micro_steps", "skipped_steps", "world_size", "zero_stage",
                          "precision", "config", "client_state"}) {
    EXPECT_THAT(refusal([&](json& c) { c["state"].erase(key); }), AllOf(HasSubstr(key), HasSubstr("training state")));
  }
  for (const char* key : {"bytes", "header_bytes", "header_checksum", "pieces"}) {
    EXPECT_THAT(refusal([&](json& c) { c["files"]["weights-00001-of-00002.safetensors"].erase(key); }), HasSubstr(key));
  }
  EXPECT_THAT(refusal([](json& c) { c["state"]["global_steps"] = "many"; }), HasSubstr("training state"));
  EXPECT_THAT(refusal([](json& c) { c["state"]["optimizer"]["groups"][0].erase("eps"); }), HasSubstr("eps"));
  EXPECT_THAT(refusal([](json& c) { c["state"]["loss_scaler"].erase("scale"); }), HasSubstr("scale"));
  EXPECT_THAT(refusal([](json& c) { c["state"]["data"]["seed"] = json(); }), HasSubstr("training state"));
}

// --- parts -----------------------------------------------------------------------------------------------------------

// Two ranks have columns of a [4, 6] matrix in blocks of 2 and 4: 1 + 2 columns, 12 elements each.
Index split_index() {
  Index index = sample_index();
  index.tensors = {{"weights/a", {.dtype = at::kFloat, .sizes = {4, 6}}}};
  index.files.clear();
  const Cut cut{.dim = 1, .blocks = {2, 4}};
  FileRecord& first = index.files["f0"];
  first = {.bytes = 112, .header_bytes = 64, .header_checksum = 0, .pieces = {}};
  first.pieces.push_back({"weights/a", "a@part-0-of-2", 0, 12, 64, {1}, StoredPart{cut, 0, 2}});
  FileRecord& second = index.files["f1"];
  second = {.bytes = 112, .header_bytes = 64, .header_checksum = 0, .pieces = {}};
  second.pieces.push_back({"weights/a", "a@part-1-of-2@0", 0, 5, 64, {1}, StoredPart{cut, 1, 2}});
  second.pieces.push_back({"weights/a", "a@part-1-of-2@5", 5, 7, 84, {1}, StoredPart{cut, 1, 2}});
  return index;
}

TEST(IndexParts, AreVersionTwoAndReadBack) {
  const Index index = split_index();
  const std::string text = to_text(index);
  EXPECT_THAT(text, HasSubstr("\"version\":2"));
  EXPECT_THAT(to_text(sample_index()), HasSubstr("\"version\":1"));
  const Index found = index_from(text, "here");
  EXPECT_EQ(to_text(found), text);
  EXPECT_EQ(found.files.at("f1").pieces[1].part, index.files.at("f1").pieces[1].part);
  Index all = split_index();  // whatever a cut may have
  for (auto& [name, file] : all.files) {
    for (Piece& piece : file.pieces)
      piece.part->cut = {.dim = 0, .repeats = 2, .grain = 1, .order = PartOrder::kZigzag};
  }
  EXPECT_EQ(index_from(to_text(all), "here").files.at("f0").pieces[0].part, all.files.at("f0").pieces[0].part);
}

// Builds from before must not take a part for the whole.
TEST(IndexParts, VersionOneHasNone) {
  std::string text = to_text(split_index());
  text.replace(text.find("\"version\":2"), 11, "\"version\":1");
  EXPECT_THAT([&] { index_from(text, "here"); }, ThrowsMessage<IoError>(HasSubstr("version 1 has no parts")));
}

TEST(IndexParts, EveryChangedByteIsFoundOrMeansNothing) {
  const std::string text = to_text(split_index());
  for (size_t at = 0; at < text.size(); ++at) {
    for (const int bits : {0x01, 0x02, 0x10, 0x80}) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      try {
        EXPECT_EQ(to_text(index_from(damaged, "here")), text) << "byte " << at;
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), StartsWith("here: "));
      }
    }
  }
}

std::string part_refusal(const std::function<void(json& first, json& second, json& third)>& change) {
  json content = content_of(split_index());
  json& files = content["files"];
  change(files["f0"]["pieces"][0], files["f1"]["pieces"][0], files["f1"]["pieces"][1]);
  try {
    index_from(sealed(content), "here");
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), StartsWith("here"));
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << content.dump(1);
  return {};
}

TEST(IndexParts, CoverEveryPartExactlyOnce) {
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[2] = 4; }),
              AllOf(HasSubstr("\"weights/a\", part 1 of 2"), HasSubstr("element 4 is there twice")));
  EXPECT_THAT(part_refusal([](json&, json& second, json&) { second[3] = 4; }),
              AllOf(HasSubstr("part 1 of 2"), HasSubstr("element 4 is in no file")));
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[3] = 6; }),
              AllOf(HasSubstr("part 1 of 2"), HasSubstr("elements from 11 to 12 are in no file")));
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[3] = 8; }),
              AllOf(HasSubstr("part 1 of 2"), HasSubstr("which has 12")));
  EXPECT_THAT(part_refusal([](json& first, json&, json&) { first[6]["index"] = 1; }),
              AllOf(HasSubstr("part 0 of 2"), HasSubstr("elements from 0 to 12")));
  EXPECT_THAT(part_refusal([](json& first, json& second, json& third) {
                for (json* piece : {&first, &second, &third}) (*piece)[6]["count"] = 3;
              }),
              HasSubstr("weights/a"));
}

TEST(IndexParts, AreOfOneCut) {
  const auto mixed = AllOf(HasSubstr("weights/a"), HasSubstr("of one cut"));
  EXPECT_THAT(part_refusal([](json& first, json&, json&) { first.erase(6); }), mixed);
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third.erase(6); }), mixed);
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[6]["blocks"] = {4, 2}; }), mixed);
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[6]["count"] = 4; }), HasSubstr("weights/a"));
  EXPECT_THAT(part_refusal([](json&, json&, json& third) { third[6]["order"] = "zigzag"; }), HasSubstr("weights/a"));
}

// Numbers that are none of a part are refused before anything is computed of them.
TEST(IndexParts, HostileNumbers) {
  const std::vector<std::pair<const char*, json>> changes = {{"dim", -1},
                                                             {"dim", 2},
                                                             {"dim", INT64_MAX},
                                                             {"dim", UINT64_MAX},
                                                             {"dim", 0.5},
                                                             {"dim", "1"},
                                                             {"dim", json()},
                                                             {"index", -1},
                                                             {"index", 2},
                                                             {"index", INT64_MAX},
                                                             {"count", 0},
                                                             {"count", -2},
                                                             {"count", 1000000000},
                                                             {"count", INT64_MAX},
                                                             {"count", true},
                                                             {"blocks", {2, 5}},
                                                             {"blocks", {7, -1}},
                                                             {"blocks", json(7)},
                                                             {"blocks", {"2", 4}},
                                                             {"blocks", {2}},
                                                             {"grain", 0},
                                                             {"grain", -1},
                                                             {"grain", 3},
                                                             {"grain", INT64_MAX},
                                                             {"repeats", 0},
                                                             {"repeats", -1},
                                                             {"repeats", 2},
                                                             {"repeats", INT64_MAX},
                                                             {"repeats", 1 << 20},
                                                             {"order", "zigzags"},
                                                             {"order", 1},
                                                             {"blocks", {INT64_MAX, INT64_MAX, 8}},
                                                             {"blocks", {INT64_MIN, 6}},
                                                             {"blocks", std::vector<int64_t>(3000000, 0)}};
  for (const auto& [name, value] : changes) {
    const std::string text = part_refusal([&, &key = name, &number = value](json& first, json& second, json& third) {
      for (json* piece : {&first, &second, &third}) (*piece)[6][key] = number;
    });
    EXPECT_LT(text.size(), 2000U);
  }
  for (const json& value : {json("part"), json(), json(7), json::array({1, 2})}) {
    part_refusal([&](json& first, json&, json&) { first[6] = value; });
  }
  for (const char* key : {"dim", "index", "count"}) {
    EXPECT_THAT(part_refusal([&](json& first, json&, json&) { first[6].erase(key); }), HasSubstr(key));
  }
}

// As many parts as there may be, of a tensor that has elements for none of them but a few.
TEST(IndexParts, ManyEmptyParts) {
  const auto many = [](json& first, json& second, json& third) {
    for (json* piece : {&first, &second, &third}) {
      (*piece)[6] = {{"dim", 1}, {"index", (*piece)[6]["index"]}, {"count", 1 << 20}};
    }
  };
  EXPECT_THAT(part_refusal(many), HasSubstr("weights/a"));
}

// --- tables of ranks -------------------------------------------------------------------------------------------------

Index table_of(const std::string& file, TensorInfo tensor) {
  Index index;
  index.tensors["weights/a"] = std::move(tensor);
  index.files[file] = {};
  return index;
}

TEST(Index, TablesOfRanksThatDisagree) {
  const auto joined = [](const Index& one, const Index& other) {
    Index index;
    add_table(index, table_to_json(one), "rank 0");
    add_table(index, table_to_json(other), "rank 1");
    return index;
  };
  const TensorInfo tensor{.dtype = at::kFloat, .sizes = {6}};
  EXPECT_EQ(joined(table_of("f0", tensor), table_of("f1", tensor)).files.size(), 2U);
  EXPECT_THAT([&] { joined(table_of("f0", tensor), table_of("f0", tensor)); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("rank 1"), HasSubstr("f0"), HasSubstr("twice"))));
  for (const TensorInfo& other :
       {TensorInfo{.dtype = at::kHalf, .sizes = {6}}, TensorInfo{.dtype = at::kFloat, .sizes = {2, 3}},
        TensorInfo{.dtype = at::kFloat, .sizes = {6}, .frozen = true}}) {
    EXPECT_THAT([&] { joined(table_of("f0", tensor), table_of("f1", other)); },
                ThrowsMessage<IoError>(AllOf(HasSubstr("rank 1"), HasSubstr("weights/a"), HasSubstr("two ways"))));
  }
}

// Not a number is no learning rate: it is refused when it is read back, so that no such index is published.
TEST(Index, OptionsThatAreNoNumbers) {
  Index index = sample_index();
  index.state.optimizer->groups[0].lr = std::nan("");
  EXPECT_THROW(reread(index), IoError);
}

}  // namespace
}  // namespace ds::checkpoint
