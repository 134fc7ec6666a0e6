// The file of an exported model: what is read from it, and what is said of files that are none.
#include "exported/archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "dsengine/exported_model.h"
#include "exported/program_json.h"
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

// Replaces each `from` in the text by `to`, which is as long.
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

// Takes away from the graphs in a value what parse_program() leaves out.
void leave_out_unread(nlohmann::json& value) {
  const auto keep = [](nlohmann::json& object, const std::set<std::string>& kept) {
    for (auto member = object.begin(); member != object.end();) {
      member = kept.contains(member.key()) ? std::next(member) : object.erase(member);
    }
  };
  if (value.is_object() && value.contains("nodes")) {
    for (nlohmann::json& node : value["nodes"]) keep(node["metadata"], {"nn_module_stack", "stack_trace"});
    for (nlohmann::json& meta : value["tensor_values"]) keep(meta, {"dtype", "sizes"});
  }
  if (value.is_structured()) {
    for (nlohmann::json& member : value) leave_out_unread(member);
  }
}

TEST(ExportedArchive, AProgramIsReadWithoutWhatNoReaderLooksAt) {
  for (const std::string name : {"mlp", "pieces", "hf_llama"}) {
    const Archive archive(kFolder + name + ".pt2");
    const auto bytes = archive.zip().record(archive.folder() + "models/model.json");
    nlohmann::json expected = nlohmann::json::parse(bytes.begin(), bytes.end());
    const nlohmann::json whole = expected;
    leave_out_unread(expected);
    EXPECT_NE(expected, whole);
    EXPECT_EQ(archive.program("model"), expected) << name;
  }
}

TEST(ExportedArchive, ValuesWithTheNamesOfFieldsAreRead) {
  const std::string text = R"({"nodes": [{"metadata": {"torch_fn": 1, "stack_trace": [2, {"torch_fn": 3}]}}],
      "tensor_values": {"tensor_values": {"layout": [7], "dtype": 1}, "nodes": {"metadata": {"a": 1}, "sizes": [{}]}},
      "metadata": {"a": [null, true, -1, 0.5, "\u00e9"]}, "twice": 1, "twice": 2})";
  EXPECT_EQ(parse_program(text),
            nlohmann::json::parse(R"({"nodes": [{"metadata": {"stack_trace": [2, {"torch_fn": 3}]}}],
      "tensor_values": {"tensor_values": {"dtype": 1}, "nodes": {"sizes": [{}]}},
      "metadata": {"a": [null, true, -1, 0.5, "\u00e9"]}, "twice": 2})"));
  for (const std::string damaged : {"", "{\"a\": [1, 2}", "{\"a\": 1e999}", "[1] 2"}) {
    std::string expected;
    try {
      static_cast<void>(nlohmann::json::parse(damaged));
    } catch (const nlohmann::json::exception& error) {
      expected = error.what();
    }
    EXPECT_NE(expected, "");
    EXPECT_EQ(test::thrown_by<nlohmann::json::exception>([&] { parse_program(damaged); }), expected);
  }
}

TEST(ExportedArchive, AnUnknownProgramIsToldWithThoseThatAreThere) {
  const Archive archive(kFolder + "mlp.pt2");
  EXPECT_THAT(test::thrown_by<IoError>([&] { archive.program("other"); }),
              AllOf(StartsWith(archive.path()), HasSubstr("no program \"other\"; it has model")));
}

TEST(ExportedArchive, TiedParametersAreOneTensor) {
  EXPECT_THAT(tied_names(Archive(kFolder + "gpt.pt2").weights("model")),
              ElementsAre(testing::Pair("wte.weight", "head.weight")));
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

// Leaves out the checksums of a good file, so that its texts can be changed.
std::string without_checksums(std::string bytes) {
  const std::string entry = "PK\1\2";
  constexpr size_t kChecksum = 16;
  for (size_t at = bytes.find(entry); at != std::string::npos; at = bytes.find(entry, at + 1)) {
    bytes.replace(at + kChecksum, 4, 4, '\0');
  }
  return bytes;
}

class RefusedFile : public testing::Test {
 protected:
  std::string said(const std::string& bytes, const ExportedOptions& options = {}) const {
    const std::string path = folder_.write("model.pt2", bytes);
    return test::thrown_by<IoError>([&] { load_exported(path, options); });
  }

  const test::ScratchFolder folder_;
  const std::string stored_ = bytes_of(kFolder + "mlp.pt2");
  const std::string good_ = without_checksums(stored_);
};

TEST_F(RefusedFile, IsNoExportedModel) {
  EXPECT_THAT(said("text"), HasSubstr("no end of a zip directory"));
  EXPECT_THAT(said(good_.substr(0, good_.size() / 2)), HasSubstr("no end of a zip directory"));
  EXPECT_THAT(said(with(good_, "archive_format", "archive_forma_")),
              AllOf(HasSubstr("no exported model"), HasSubstr("torch.export.save(")));
  EXPECT_THAT(said(with(good_, "models/model.json", "models/model.jso_")), HasSubstr("holds no program"));
  EXPECT_THAT(said(with(good_, "data/weights/model_weights_config.json", "data/weights/model.pt_________________")),
              HasSubstr("\"body.0.weight\" of the program is not stored"));
  EXPECT_THAT(test::thrown_by<IoError>([&] { load_exported(folder_ / "missing.pt2"); }), HasSubstr("missing.pt2"));
}

TEST_F(RefusedFile, IsDamaged) {
  const std::string target = "\"target\": \"torch.ops.aten.linear";
  EXPECT_THAT(said(with(stored_, target, "\"target\": \"torch.ops.aten.limear")),
              HasSubstr("does not have its checksum"));
  EXPECT_THAT(said(with(good_, "{\"graph_module\"", "[\"graph_module\"")), HasSubstr("the file is damaged"));
  EXPECT_THAT(said(with(good_, "\"nodes\"", "\"nodez\"")), HasSubstr("'nodes' not found; the file is damaged"));
  EXPECT_THAT(said(with(good_, "\"outputs\": [{\"as_tensor\": {\"name\": \"linear_2\"}}], \"nodes\"",
                        "\"outputs\": [{\"as_tensor\": {\"name\": \"linear_9\"}}], \"nodes\"")),
              HasSubstr("the value \"linear_9\" is used before it is made"));
  EXPECT_THAT(said(with(good_, "\"path_name\": \"weight_0\"", "\"path_name\": \"weight_5\"")),
              HasSubstr("elements of the record \"data/weights/weight_5\", which has"));
}

// An output that changes an input, of which a baked one has no value in the graph.
TEST_F(RefusedFile, ChangesAnInputThatItDoesNotHave) {
  std::string bytes = without_checksums(bytes_of(kFolder + "pieces.pt2"));
  const std::string output = R"({"user_output": {"arg": {"as_tensor": {"name": ")";
  const size_t at = bytes.find(output);
  ASSERT_NE(at, std::string::npos);
  std::string changed = R"({"user_input_mutation": {"user_input_name": ""}})";
  const size_t end = bytes.find("}}}}", at) + 4;
  ASSERT_LE(changed.size(), end - at);
  changed.resize(end - at, ' ');
  EXPECT_THAT(said(bytes.replace(at, changed.size(), changed)),
              HasSubstr("the input \"\" that the program changes is none of its own; the file is damaged"));
}

TEST_F(RefusedFile, IsOfAnotherSchema) {
  EXPECT_THAT(said(with(good_, "\"major\": 8", "\"major\": 9")),
              AllOf(HasSubstr("schema 9.17, written by torch 2."), HasSubstr("expected a schema 8.x")));
}

TEST_F(RefusedFile, HasOperatorsThatAreNotHere) {
  EXPECT_THAT(
      said(with(good_, "\"torch.ops.aten.relu.default", "\"torch.ops.aten.relo.default")),
      AllOf(HasSubstr("node \"relu\" (aten.relo.default, in module \"body.1\")"),
            HasSubstr("has no such operator; the file was written by torch 2."), HasSubstr("in Python: File \"")));
  EXPECT_THAT(said(with(good_, "\"torch.ops.aten.relu.default", "\"torch.ops.mine.relu.default")),
              HasSubstr("has to be registered under this name before the model is loaded"));
  EXPECT_THAT(said(with(good_, "\"torch.ops.aten.relu.default\"", "\"torch.ops.higher_order.scan\"")),
              HasSubstr("this operator of higher order cannot be trained; supported are cond"));
  EXPECT_THAT(said(with(good_, "\"name\": \"train\", \"arg\"", "\"name\": \"tr_in\", \"arg\"")),
              HasSubstr("argument \"train\" is missing"));
}

// The file of export(m, (t, t)) has two inputs, and its program reads one of them.
TEST_F(RefusedFile, DoesNotReadAnInput) {
  const std::string unread = with(good_, R"("name": "input", "arg": {"as_tensor": {"name": "x"}})",
                                  R"("name": "input", "arg": {"as_none": true           })");
  EXPECT_THAT(said(unread), AllOf(HasSubstr("the program does not read the input \"x\""), HasSubstr("x.clone()")));
  EXPECT_EQ(said(unread, {.unused_inputs = true}), "no error");
}

TEST_F(RefusedFile, WasExportedInEval) {
  const std::string path = folder_.write("model.pt2", with(good_, "{\"as_bool\": true}", "{\"as_bool\":false}"));
  const std::shared_ptr<ExportedModule> model = load_exported(path);
  const at::Tensor x = at::ones({4, model->inputs()[0].sizes[1].least});
  EXPECT_THAT(test::thrown_by<UsageError>([&] { model->forward(x); }),
              AllOf(HasSubstr("was exported in eval()"), HasSubstr("model.train() before torch.export.export")));
  model->eval();
  EXPECT_NO_THROW(model->forward(x));
  EXPECT_NO_THROW(load_exported(path, {.baked_mode = true})->forward(x));
  // Two files: each mode has its own.
  const std::shared_ptr<ExportedModule> both = load_exported(kFolder + "mlp.pt2", {.eval = path});
  EXPECT_FALSE(both->forward(x).equal(both->forward(x)));
  both->eval();
  EXPECT_TRUE(both->forward(x).equal(model->forward(x)));
}

}  // namespace
}  // namespace ds::exported
