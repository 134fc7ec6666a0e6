// Files as the Python package writes them (safetensors_python.safetensors, made by safetensors_python.py), our own, and
// broken ones.
#include "core/files/safetensors.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/text.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"

namespace ds {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

class SafetensorsTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  // A file with this header and `data_bytes` zero bytes.
  std::string broken(const std::string& header, size_t data_bytes, int64_t announced = -1) const {
    const auto length = static_cast<uint64_t>(announced < 0 ? static_cast<int64_t>(header.size()) : announced);
    std::ofstream out(path("broken"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header << std::string(data_bytes, '\0');
    return path("broken");
  }
  void expect_refused(const std::string& header, size_t data_bytes, const std::string& reason) const {
    const std::string file = broken(header, data_bytes);
    EXPECT_THAT([&] { SafetensorsFile{file}; },
                ThrowsMessage<IoError>(testing::AllOf(HasSubstr(file), HasSubstr(reason))))
        << header;
  }
  test::ScratchFolder folder_;
};

std::vector<std::pair<std::string, at::Tensor>> every_dtype() {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(c10::toString(dtype), (torch::arange(6).view({2, 3}) % 2).to(dtype));
  }
  tensors.emplace_back("scalar", torch::tensor(2.5F));
  tensors.emplace_back("empty", torch::empty({0, 4}));
  tensors.emplace_back("a \"quoted\" name / \xc3\xa9", torch::ones({1}));
  return tensors;
}

TEST_F(SafetensorsTest, EveryDtypeAndShapeComesBack) {
  const auto tensors = every_dtype();
  write_safetensors(path("all"), tensors, {{"format", "pt"}});
  const SafetensorsFile file(path("all"));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(read, tensor)) << name;
  }
}

TEST_F(SafetensorsTest, SameBytesAsThePythonPackage) {
  const std::string python = DS_SOURCE_DIR "/tests/core/safetensors_python.safetensors";
  const SafetensorsFile file(python);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& entry : file.entries()) tensors.emplace_back(entry.name, file.tensor(entry.name));
  EXPECT_TRUE(torch::equal(file.tensor("f32"), torch::tensor({{1.0F, -2.5F}, {3.0F, 4.0F}})));
  EXPECT_TRUE(torch::equal(file.tensor("bf16"), torch::tensor({0.5, -1.0, 2.0}, torch::kBFloat16)));
  EXPECT_TRUE(torch::equal(file.tensor("i64"), torch::tensor({-1L, 1L << 40})));
  EXPECT_TRUE(torch::equal(file.tensor("bool"), torch::tensor({true, false, true})));
  write_safetensors(path("ours"), tensors, file.metadata());
  EXPECT_EQ(test::file_text(path("ours")), test::file_text(python));
}

TEST_F(SafetensorsTest, StridedTensorsAreWrittenRowMajor) {
  const at::Tensor matrix = torch::arange(6).view({2, 3});
  write_safetensors(path("t"), {{"t", matrix.t()}});
  EXPECT_TRUE(torch::equal(SafetensorsFile(path("t")).tensor("t"), matrix.t()));
}

TEST_F(SafetensorsTest, AViewOutlivesTheFileObjectAndNeverChangesTheFile) {
  write_safetensors(path("v"), {{"v", torch::ones({4})}});
  const std::string before = test::file_text(path("v"));
  at::Tensor view;
  {
    const SafetensorsFile file(path("v"));
    view = file.tensor("v");
  }
  view.add_(1);
  EXPECT_TRUE(torch::equal(view, torch::full({4}, 2.0F)));
  EXPECT_EQ(test::file_text(path("v")), before);
}

TEST_F(SafetensorsTest, DataThatAForeignWriterLeftUnalignedIsRead) {
  const std::string file = broken(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} )", 8);
  EXPECT_TRUE(torch::equal(SafetensorsFile(file).tensor("a"), torch::zeros({2})));
}

// A parser of nlohmann's with a callback takes minutes for this header: its time grows with the square of the number.
TEST_F(SafetensorsTest, HeadersOfManyTensorsAreReadAndSearchedForEqualNames) {
  constexpr int kTensors = 50'000;
  const auto entry = [](int name, int place) {
    return cat("\"t", name, R"(":{"dtype":"U8","shape":[1],"data_offsets":[)", place, ",", place + 1, "]}");
  };
  std::string entries;
  for (int i = 0; i < kTensors; ++i) entries += entry(i, i) + ",";
  const SafetensorsFile file(broken("{" + entries + entry(kTensors, kTensors) + "}", kTensors + 1));
  EXPECT_EQ(file.entries().size(), kTensors + 1U);
  expect_refused("{" + entries + entry(7, kTensors) + "}", kTensors + 1, "the header names \"t7\" twice");
}

TEST_F(SafetensorsTest, BrokenFilesAreRefusedWithAReason) {
  expect_refused("[]", 0, "start with '{'");
  expect_refused("{", 0, "not JSON");
  expect_refused(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      8, "names \"a\" twice");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"dtype":"F32"}})", 4, "names \"dtype\" twice");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "expected {dtype, shape, data_offsets}");
  expect_refused(R"({"a":{"dtype":"F9","shape":[1],"data_offsets":[0,4]}})", 4, "dtype \"F9\"");
  expect_refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "integers >= 0");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "begin <= end");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
                 "has 8 bytes, its data_offsets span 4");
  expect_refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4, "too many");
  expect_refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0, "too many");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "truncated");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "a hole after the header");
  expect_refused(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      8, "overlaps \"a\"");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 8, "bytes after the last tensor");
  expect_refused(R"({"__metadata__":{"x":1}})", 0, "__metadata__");
  const std::string deep(3'000'000, '[');
  expect_refused(R"({"a":)" + deep + std::string(deep.size(), ']') + "}", 0, "nested");
}

TEST_F(SafetensorsTest, WrongLengthsAreRefused) {
  EXPECT_THAT([&] { SafetensorsFile(broken("{}", 0, 100)); }, ThrowsMessage<IoError>(HasSubstr("truncated")));
  EXPECT_THAT([&] { SafetensorsFile(broken("{}", 0, std::numeric_limits<int64_t>::max())); },
              ThrowsMessage<IoError>(HasSubstr("not a safetensors file")));
  std::ofstream(path("short")) << "abc";
  EXPECT_THAT([&] { SafetensorsFile(path("short")); }, ThrowsMessage<IoError>(HasSubstr("at least 8 bytes")));
  EXPECT_THAT([&] { SafetensorsFile(path("missing")); }, ThrowsMessage<IoError>(HasSubstr("missing: cannot open")));
}

TEST_F(SafetensorsTest, AFailedWriteLeavesTheOldFile) {
  write_safetensors(path("w"), {{"w", torch::ones({2})}});
  const std::string before = test::file_text(path("w"));
  EXPECT_THAT(
      [&] {
        write_safetensors(path("w"), {{"w", torch::ones({2})}, {"c", torch::ones({2}, torch::kComplexFloat)}});
      },
      ThrowsMessage<UsageError>(HasSubstr("\"c\"")));
  EXPECT_THAT(
      [&] {
        write_safetensors(path("w"), {{"w", torch::ones({2})}, {"w", torch::ones({2})}});
      },
      ThrowsMessage<UsageError>(HasSubstr("twice")));
  EXPECT_EQ(test::file_text(path("w")), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()), 1)
      << "no temporary file stays";
  EXPECT_THAT([&] { write_safetensors(path("no/w"), {}); },
              ThrowsMessage<IoError>(HasSubstr("No such file or directory")));
}

TEST_F(SafetensorsTest, AnAtomicFileAppearsWholeOrNotAtAll) {
  {
    AtomicFile file(path("f"));
    file.write("never", 5);
    EXPECT_FALSE(fs::exists(path("f")));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  AtomicFile file(path("f"));
  file.write("text", 4);
  file.commit();
  EXPECT_EQ(test::file_text(path("f")), "text");

  // What somebody else has put at the temporary name stays his, and is not what appears.
  std::ofstream(path("his")) << "his";
  fs::create_hard_link(path("his"), cat(path("g"), ".", getpid(), ".tmp"));
  AtomicFile other(path("g"));
  other.write("text", 4);
  other.commit();
  EXPECT_EQ(test::file_text(path("g")), "text");
  EXPECT_EQ(test::file_text(path("his")), "his");
  EXPECT_THAT([&] { AtomicFile{folder_.path().string()}; }, ThrowsMessage<IoError>(HasSubstr("this is a folder")));
}

}  // namespace
}  // namespace ds
