// Files that torch.save wrote: tests/checkpoint/deepspeed_fixtures.py, values.
#include "checkpoint/pickle/torch_archive.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "checkpoint/pickle/pickle_field.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kValues = std::string(DS_SOURCE_DIR) + "/tests/checkpoint/deepspeed_fixtures/values/";

template <class Call>
std::string error_of(const Call& call) {
  return test::thrown_by<IoError>(call);
}

std::string refusal_of(const std::string& path) {
  return error_of([&path] { TorchArchive archive(path); });
}

PickleField values_of(const TorchArchive& archive) { return {archive.root(), archive.path()}; }

TEST(TorchArchive, TensorsAreThoseThatWereSaved) {
  const TorchArchive archive(kValues + "values.pt");
  const SafetensorsFile expected(kValues + "expected.safetensors");
  const PickleField tensors = values_of(archive).at("tensors");
  ASSERT_EQ(tensors.entries().size(), expected.entries().size());
  for (const auto& [name, field] : tensors.entries()) {
    const at::Tensor found = archive.tensor(field.tensor());
    const at::Tensor wanted = expected.tensor(name);
    EXPECT_EQ(found.scalar_type(), wanted.scalar_type()) << name;
    EXPECT_TRUE(at::equal(found, wanted)) << name;
    for (int64_t offset = 0; offset < wanted.numel(); ++offset) {  // in parts, converted
      const int64_t numel = std::min<int64_t>(3, wanted.numel() - offset);
      const at::Tensor part = at::empty({numel}, at::kDouble);
      archive.read(field.tensor(), offset, part);
      EXPECT_TRUE(at::equal(part, wanted.reshape({-1}).narrow(0, offset, numel).to(at::kDouble))) << name << offset;
    }
    EXPECT_THROW(archive.read(field.tensor(), wanted.numel(), at::empty({1})), UsageError);
  }
}

TEST(TorchArchive, ValuesAreThoseThatWereSaved) {
  const TorchArchive archive(kValues + "values.pt");
  const PickleField values = values_of(archive);
  EXPECT_TRUE(values.at("none").is_none());
  EXPECT_FALSE(values.find("none"));
  EXPECT_TRUE(values.at("true").boolean());
  EXPECT_EQ(values.at("negative").integer(), -3);
  EXPECT_EQ(values.at("large").integer(), int64_t{1} << 40);
  EXPECT_TRUE(values.at("huge").is(PickleKind::kBigInt));
  EXPECT_EQ(values.at("pi").number(), 3.25);
  EXPECT_EQ(values.at("text").text(), "gr\xc3\xbcn");
  EXPECT_EQ(values.at("bytes").value().text, std::string("\0\xff", 2));
  EXPECT_EQ(plain_json(values.at("tuple").value()), nlohmann::json::parse("[1, [2, 3], []]"));
  EXPECT_EQ(values.at("set").value().items.at(0)->integer, 5);
  EXPECT_EQ(values.at("size").sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(values.at("dtype").value().text, "torch.bfloat16");
  EXPECT_EQ(values.at("ordered").entries()[0].first, "b");
  EXPECT_EQ(plain_json(values.at("numbered").value()), nlohmann::json::parse(R"({"1": "one"})"));
  EXPECT_EQ(values.at("loop").item(1).value().items.size(), 2);
  EXPECT_EQ(values.at("namespace").value().attribute("lr")->number, 0.5);
  EXPECT_EQ(values.at("fraction").value().text, "fractions.Fraction");
}

TEST(TorchArchive, SaysWhatItCannotRead) {
  const TorchArchive archive(kValues + "values.pt");
  const PickleField values = values_of(archive);
  EXPECT_THAT(error_of([&] { archive.tensor(values.at("complex").tensor()); }), HasSubstr("torch.ComplexFloatStorage"));
  EXPECT_THAT(error_of([&] { values.at("missing"); }), HasSubstr("values.pt: no key \"missing\""));
  EXPECT_THAT(error_of([&] { values.at("text").integer(); }), HasSubstr("text: expected an int, found a string"));
  EXPECT_THAT(error_of([&] { values.at("tuple").item(1).item(2); }), HasSubstr("tuple[1]: expected more than 2 items"));
  EXPECT_THAT(refusal_of(kValues + "old_format.pt"), HasSubstr("before torch 1.6"));
  EXPECT_THAT(refusal_of(kValues + "expected.safetensors"), HasSubstr("expected a file of torch.save"));
  EXPECT_THAT(refusal_of(kValues + "absent.pt"), HasSubstr("absent.pt"));
}

// Reads all there is. Whatever the bytes are, the answer is values or an IoError.
void read_all(const std::string& path) {
  try {
    const TorchArchive archive(path);
    plain_json(archive.root());
    for (const auto& [name, field] : values_of(archive).at("tensors").entries()) archive.tensor(field.tensor());
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(path));
  }
}

TEST(TorchArchive, SurvivesTruncation) {
  const test::ScratchFolder folder;
  const std::string whole = test::file_text(kValues + "values.pt");
  for (size_t bytes = 0; bytes < whole.size(); bytes += 23) {
    const std::string path = folder.write("cut.pt", whole.substr(0, bytes));
    EXPECT_THROW(TorchArchive{path}, IoError) << bytes;
  }
}

TEST(TorchArchive, SurvivesFlippedBytes) {
  const test::ScratchFolder folder;
  const std::string whole = test::file_text(kValues + "values.pt");
  for (size_t at = 0; at < whole.size(); at += 2) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (at % 3 == 0 ? 0xff : 1 << at / 2 % 8));
    read_all(folder.write("flipped.pt", damaged));
  }
}

// Where the zip's directory describes a record; the directory stands behind all records.
size_t entry_of(const std::string& archive, const std::string& record) { return archive.rfind(record) - 46; }

// Each would give tensors without an error to a reader that trusts the directory.
TEST(TorchArchive, RefusesRecordsThatTorchSaveNeverWrites) {
  const test::ScratchFolder folder;
  const std::string whole = test::file_text(kValues + "values.pt");
  const size_t entry = entry_of(whole, "values/data/3");
  std::string changed = whole;
  changed[entry + 10] = 8;  // method: deflated
  EXPECT_THAT(refusal_of(folder.write("changed.pt", changed)),
              AllOf(HasSubstr("changed.pt: record \"values/data/3\""), HasSubstr("compressed")));
  changed = whole;
  changed[entry + 46 + std::strlen("values/data/")] = '4';
  EXPECT_THAT(refusal_of(folder.write("changed.pt", changed)), HasSubstr("record \"values/data/4\" is there twice"));
  changed = whole;
  changed[entry + 44] = 1;  // the record begins 64 KiB later, behind the end of the file
  EXPECT_THAT(refusal_of(folder.write("changed.pt", changed)), HasSubstr(cat("in a file of ", whole.size(), " bytes")));
  changed = whole;
  changed[entry + 42] ^= 64;  // it begins where no header is
  EXPECT_THAT(refusal_of(folder.write("changed.pt", changed)), HasSubstr("no header of record \"values/data/3\""));
}

TEST(TorchArchive, NamesOfRecordsDifferInCase) {
  const test::ScratchFolder folder;
  std::string changed = test::file_text(kValues + "values.pt");
  changed.replace(changed.rfind("values/data/9"), std::strlen("values/data/9"), "values/DATA/0");
  const TorchArchive archive(folder.write("changed.pt", changed));
  const SafetensorsFile expected(kValues + "expected.safetensors");
  int of_first = 0, of_renamed = 0;
  for (const auto& [name, field] : values_of(archive).at("tensors").entries()) {
    const TensorReference& tensor = field.tensor();
    if (tensor.storage == "0") {
      EXPECT_TRUE(at::equal(archive.tensor(tensor), expected.tensor(name))) << name;
      ++of_first;
    } else if (tensor.storage == "9") {
      EXPECT_THROW(archive.tensor(tensor), IoError) << name;
      ++of_renamed;
    }
  }
  EXPECT_GT(of_first, 0);
  EXPECT_GT(of_renamed, 0);
}

TEST(TorchArchive, ChecksTheSumOfThePickle) {
  const test::ScratchFolder folder;
  std::string damaged = test::file_text(kValues + "values.pt");
  damaged[damaged.find("namespace")] = 'N';
  const std::string path = folder.write("sum.pt", damaged);
  EXPECT_THROW(TorchArchive{path}, IoError);
}

}  // namespace
}  // namespace ds::checkpoint
