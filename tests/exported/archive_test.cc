// The file of an exported model: what is read from it, and what is said of files that are none.
#include "exported/archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "dsengine/exported_model.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::exported {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

const std::string kFolder = std::string(DS_SOURCE_DIR) + "/tests/exported/data/";

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// `text` with each `from` as `to`, which is as long.
std::string with(std::string text, const std::string& from, const std::string& to) {
  EXPECT_EQ(from.size(), to.size());
  EXPECT_NE(text.find(from), std::string::npos) << from;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) {
    text.replace(at, from.size(), to);
  }
  return text;
}

TEST(ExportedArchive, NamesProgramsAndWhereTensorsLie) {
  const Archive archive(kFolder + "mlp.pt2");
  EXPECT_THAT(archive.programs(), ElementsAre("model"));
  const StoredTensors weights = archive.weights("model");
  ASSERT_TRUE(weights.contains("out.weight"));
  const StoredTensor& stored = weights.at("out.weight");
  EXPECT_TRUE(stored.is_parameter && stored.requires_grad);
  EXPECT_EQ(stored.device_type, "cpu");
  const at::Tensor full = at::empty(stored.sizes);
  archive.read(stored, 0, full);
  const at::Tensor part = at::empty({3}, at::kDouble);
  archive.read(stored, 2, part);
  EXPECT_TRUE(part.equal(full.view({-1}).narrow(0, 2, 3).to(at::kDouble)));
  EXPECT_THROW(archive.read(stored, stored.numel() - 1, part), UsageError);
}

TEST(ExportedArchive, AnUnknownProgramIsToldWithThoseThatAreThere) {
  const Archive archive(kFolder + "mlp.pt2");
  EXPECT_THAT(test::thrown_by<IoError>([&] { archive.program("other"); }),
              AllOf(StartsWith(archive.path()), HasSubstr("no program \"other\"; it has model")));
}

TEST(ExportedArchive, TiedParametersAreOneTensor) {
  const StoredTensors weights = Archive(kFolder + "gpt.pt2").weights("model");
  EXPECT_TRUE(weights.at("head.weight").is_same(weights.at("wte.weight")));
  EXPECT_FALSE(weights.at("head.weight").is_same(weights.at("wpe.weight")));
}

TEST(ExportedArchive, IsASourceOfWeights) {
  const std::unique_ptr<checkpoint::Source> source = checkpoint::open_weights(kFolder + "gpt.pt2");
  const std::shared_ptr<ExportedModule> model = load_exported(kFolder + "gpt.pt2");
  for (const auto& item : model->named_parameters()) {
    const std::string path = checkpoint::weight_path(item.key());
    const auto alias = source->aliases().find(path);
    EXPECT_TRUE(source->tensor(alias == source->aliases().end() ? path : alias->second).equal(item.value())) << path;
  }
  EXPECT_EQ(source->aliases().size(), 1U);
}

TEST(ExportedArchive, OtherFilesAreToldWhatToDo) {
  const test::ScratchFolder folder;
  const std::string good = bytes_of(kFolder + "mlp.pt2");
  const auto said = [&](const std::string& bytes) {
    const std::string path = folder.write("model.pt2", bytes);
    return test::thrown_by<IoError>([&] { load_exported(path); });
  };
  EXPECT_THAT(said("text"), HasSubstr("no end of a zip directory"));
  EXPECT_THAT(said(good.substr(0, good.size() / 2)), HasSubstr("no end of a zip directory"));
  EXPECT_THAT(said(with(good, "archive_format", "archive_forma_")),
              AllOf(HasSubstr("no exported model"), HasSubstr("torch.export.save(")));
  EXPECT_THAT(said(with(good, "models/model.json", "models/model.jso_")), HasSubstr("holds no program"));
  EXPECT_THAT(said(with(good, "\"target\": \"torch.ops.aten.linear", "\"target\": \"torch.ops.aten.limear")),
              HasSubstr("does not have its checksum"));
  EXPECT_THAT(test::thrown_by<IoError>([&] { load_exported(folder / "missing.pt2"); }), HasSubstr("missing.pt2"));
}

}  // namespace
}  // namespace ds::exported
