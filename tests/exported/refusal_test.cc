// What load_exported() and load_exported_pipeline() say of a file in which one thing is not as it has to be, word by
// word.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/files/stored_zip.h"
#include "core/text.h"
#include "dsengine/exported_model.h"
#include "dsengine/exported_pipeline.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

const std::string kPrefix = std::string(DS_SOURCE_DIR) + "/tests/exported/data/";
const std::string kProgram = "models/model.json";
const std::string kWeights = "data/weights/model_weights_config.json";
const std::string kAgain = "; the file is damaged, export the model again";

// A number of `bytes` bytes, the lowest first.
std::string little(size_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i, value /= 256) text += static_cast<char>(value % 256);
  return text;
}

// A zip file of stored records, without checksums.
std::string zip_of(const std::map<std::string, std::string>& records) {
  std::string file;
  std::string directory;
  for (const auto& [name, bytes] : records) {
    const std::string sizes =
        little(0, 4) + little(bytes.size(), 4) + little(bytes.size(), 4) + little(name.size(), 2) + little(0, 2);
    directory +=
        "PK\1\2" + little(20, 2) + little(20, 2) + little(0, 8) + sizes + little(0, 10) + little(file.size(), 4) + name;
    file += "PK\3\4" + little(20, 2) + little(0, 8) + sizes + name + bytes;
  }
  const std::string counts = little(records.size(), 2) + little(records.size(), 2);
  return file + directory + "PK\5\6" + little(0, 4) + counts + little(directory.size(), 4) + little(file.size(), 4) +
         little(0, 2);
}

// Loads a model whose loss is the mean of its output.
std::shared_ptr<ExportedPipeline> load_pipeline(const std::string& path, const ExportedOptions& file) {
  ExportedPipelineOptions options;
  options.file = file;
  options.pipeline.loss = [](const at::Tensor& output, const at::Tensor& /*label*/) { return output.mean(); };
  return load_exported_pipeline(path, options);
}

// The records of a stored model, to be changed.
class EditedFile {
 public:
  explicit EditedFile(const std::string& name) {
    const StoredZip zip(kPrefix + name + ".pt2");
    for (const std::string& record : zip.names()) {
      const auto bytes = zip.record(record);
      records_[record] = {bytes.begin(), bytes.end()};
    }
    folder_ = name + "/";
  }

  std::string& operator[](const std::string& record) { return records_[folder_ + record]; }
  void rename(const std::string& from, const std::string& to) {
    const auto found = records_.find(folder_ + from);
    ASSERT_NE(found, records_.end()) << from;
    records_[folder_ + to] = found->second;
    records_.erase(found);
  }
  // Replaces the value at a JSON pointer; null takes it away.
  void set(const std::string& record, const std::string& pointer, const json& value) {
    json content = json::parse((*this)[record]);
    const json::json_pointer place(pointer);
    ASSERT_TRUE(content.contains(place)) << pointer;
    if (value.is_null()) {
      json& parent = content.at(place.parent_pointer());
      parent.is_array() ? parent.erase(std::stoul(place.back())) : static_cast<void>(parent.erase(place.back()));
    } else {
      content[place] = value;
    }
    (*this)[record] = content.dump();
  }

  std::string write(const test::ScratchFolder& folder) const { return folder.write("model.pt2", zip_of(records_)); }

  // What load_exported() says, behind the path of the file.
  std::string said(const ExportedOptions& options = {}) const {
    const test::ScratchFolder folder;
    const std::string path = write(folder);
    return behind(path, test::thrown_by<IoError>([&] { load_exported(path, options); }));
  }
  // Returns the message of the error that load_exported_pipeline() throws for this file.
  std::string said_by_pipeline(const ExportedOptions& options = {}) const {
    const test::ScratchFolder folder;
    const std::string path = write(folder);
    return behind(path, test::thrown_by<IoError>([&] { load_pipeline(path, options); }));
  }

 private:
  static std::string behind(const std::string& path, const std::string& text) {
    return text.starts_with(path + ": ") ? text.substr(path.size() + 2) : text;
  }

  std::map<std::string, std::string> records_;
  std::string folder_;
};

TEST(ExportedRefusal, AFileThatIsWrittenAgainIsAsItWas) {
  EXPECT_EQ(EditedFile("mlp").said(), "no error");
  EXPECT_EQ(EditedFile("pieces").said(), "no error");
}

TEST(ExportedRefusal, OtherWritersAreNamed) {
  EditedFile old("mlp");
  old.rename("archive_format", "serialized_exported_program.json");
  EXPECT_EQ(old.said(), "written by torch 2.7 or older; export the model again with torch 2.9 or newer");
  EditedFile before("mlp");
  before.rename(kWeights, "data/weights/model.pt");
  EXPECT_EQ(
      before.said(),
      "its weights are one file of torch.save, as torch 2.8 writes them; export the model again with torch 2.9 or "
      "newer");
  EditedFile format("mlp");
  format["archive_format"] = "pt3";
  EXPECT_THAT(format.said(),
              StartsWith("its format is \"pt3\", expected \"pt2\"; write it in Python by torch.export.save("));
  EditedFile order("mlp");
  order["byteorder"] = "big";
  EXPECT_EQ(order.said(), "written with byte order \"big\", expected \"little\"");
  EditedFile versionless("mlp");
  versionless.set(kProgram, "/schema_version/major", nullptr);
  EXPECT_EQ(versionless.said(), "the program \"model\" has no version of its schema; export the model again");
  for (const int major : {7, 9}) {
    EditedFile schema("mlp");
    schema.set(kProgram, "/schema_version/major", major);
    EXPECT_THAT(schema.said(),
                AllOf(StartsWith(cat("schema ", major, ".17, written by torch 2.11.")),
                      HasSubstr("; expected a schema 8.x: export the model with a torch from 2.9 on that has it")));
  }
  EditedFile deep("mlp");
  deep[kProgram] = std::string(1000, '[');
  EXPECT_EQ(deep.said(), "\"models/model.json\" has values more than 100 levels deep");
}

// One value of a file that is changed, and the message about it.
struct Change {
  const char* file;
  std::string record;
  const char* pointer;
  json value;
  std::string says;
};

TEST(ExportedRefusal, EachValueThatCannotBeIsTold) {
  const std::string linear = "node \"linear\" (aten.linear.default, in module \"body.0\"): ";
  const std::string relu = "node \"relu\" (aten.relu.default, in module \"body.1\"): ";
  std::string deep = "body";
  for (int i = 0; i < 100; ++i) deep += ".body";
  const std::vector<Change> changes = {
      // Tensors.
      {"mlp", kWeights, "/config/body.0.bias/use_pickle", true,
       "tensor \"body.0.bias\" is of a tensor subclass, which is stored as a pickle; make it a plain tensor before the "
       "export"},
      {"mlp", kWeights, "/config/body.0.bias/tensor_meta/dtype", 99,
       "tensor \"body.0.bias\" cannot be read: dtype 99 of the schema is not known; expected 1 to 13 or 28 to 35"},
      {"mlp", kWeights, "/config/body.0.bias/tensor_meta/layout", 1,
       "tensor \"body.0.bias\" cannot be read: layout 1 of the schema: only strided tensors (7) can be trained; make "
       "the tensor dense "
       "in Python (to_dense())"},
      {"mlp", kWeights, "/config/body.0.bias/tensor_meta/sizes/0/as_int", -1,
       "tensor \"body.0.bias\" has sizes -1, strides 1 and offset 0" + kAgain},
      {"mlp", kWeights, "/config/body.0.bias/tensor_meta/storage_offset/as_int", 1,
       "tensor \"body.0.bias\" needs 25 elements of the record \"data/weights/weight_1\", which has 24" + kAgain},
      {"mlp", kWeights, "/config/body.0.bias/path_name", "weight_99",
       "tensor \"body.0.bias\" lies in the record \"data/weights/weight_99\", which the file does not have" + kAgain},
      {"mlp", kWeights, "/config/body.0.bias", nullptr,
       "the tensor \"body.0.bias\" of the program is not stored" + kAgain},
      // Operators and their arguments.
      {"mlp", kProgram, "/graph_module/graph/nodes/0/outputs/0/as_tensor/name", "x",
       linear + "the value \"x\" is made twice" + kAgain},
      {"mlp", kProgram, "/graph_module/graph/nodes/0/inputs/1/name", "wait", linear + "argument \"weight\" is missing"},
      {"mlp",
       kProgram,
       "/graph_module/graph/nodes/1/inputs/0/arg",
       {{"as_nothing", 1}},
       relu + "an argument of the kind \"as_nothing\" cannot be run"},
      {"mlp", kProgram, "/graph_module/graph/nodes/1/inputs/0/arg", json::object(),
       relu + "an argument has to be an object with one kind, found {}"},
      {"mlp",
       kProgram,
       "/graph_module/graph/nodes/1/outputs/0",
       {{"as_custom_obj", {{"x", 1}}}},
       relu + "an output of the kind \"as_custom_obj\" cannot be kept"},
      {"mlp", kProgram, "/graph_module/graph/nodes/1/target", "torch.ops.relu",
       "node \"relu\" (relu, in module \"body.1\"): expected an operator as \"aten.add.Tensor\""},
      {"mlp", kProgram, "/graph_module/graph/nodes/2/inputs/1/arg/as_float", "much",
       "node \"dropout\" (aten.dropout.default, in module \"body.2\"): the number \"much\" is none"},
      {"pieces", kProgram, "/graph_module/graph/nodes/18/target", "math.lgamma",
       "node \"mul_3\" (math.lgamma): this function of sizes is not known; known are "},
      {"pieces",
       kProgram,
       "/graph_module/graph/nodes/5/inputs/1/arg",
       {{"as_bool", true}},
       "argument 1 has to be a graph"},
      {"pieces", kProgram, "/graph_module/graph/nodes/37/inputs/1/arg/as_scalar_type", 99,
       "node \"to\" (aten.to.dtype): dtype 99 of the schema is not known; expected 1 to 13 or 28 to 35"},
      // Modules.
      {"mlp", kProgram, "/graph_module/module_call_graph/1/fqn", deep,
       "the name \"" + deep.substr(0, 117) + "...\" has more than 100 modules in one another" + kAgain},
      // Inputs and outputs of the program.
      {"mlp",
       kProgram,
       "/graph_module/signature/input_specs/0",
       {{"token", {{"arg", {{"name", "t"}}}}}},
       "an input of the kind {\"token\":{\"arg\":{\"name\":\"t\"}}} cannot be trained: script objects and effect "
       "tokens "
       "have no meaning in C++; write the model without them in Python"},
      {"mlp",
       kProgram,
       "/graph_module/signature/input_specs/6/user_input/arg",
       {{"as_sym_int", {{"as_name", "x"}}}},
       "an input of forward is {\"as_sym_int\":{\"as_name\":\"x\"}}, a dynamic number; make it a tensor in Python, or "
       "export it as a constant"},
      {"mlp", kProgram, "/graph_module/signature/input_specs/0", nullptr,
       "its graph has 7 inputs, its signature 6" + kAgain},
      {"mlp", kProgram, "/graph_module/signature/output_specs", json::array(),
       "its graph has 1 outputs, its signature 0" + kAgain},
      {"mlp",
       kProgram,
       "/graph_module/signature/output_specs/0",
       {{"loss_output", 1}},
       "an output of the kind {\"loss_output\":1} cannot be trained; export the model itself, not a graph with its "
       "backward "
       "pass, and do not change parameters in forward"},
      {"mlp",
       kProgram,
       "/graph_module/signature/output_specs/0",
       {{"buffer_mutation", {{"buffer_name", "b"}}}},
       "the buffer \"b\" that the program changes is none of its own" + kAgain},
      {"mlp",
       kProgram,
       "/graph_module/signature/output_specs/0",
       {{"user_input_mutation", {{"user_input_name", "b"}}}},
       "the input \"b\" that the program changes is none of its own" + kAgain},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(cat(change.file, " ", change.pointer));
    EditedFile file(change.file);
    file.set(change.record, change.pointer, change.value);
    EXPECT_THAT(file.said(), HasSubstr(change.says));
  }
}

// The tree of modules is read apart from the program.
TEST(ExportedRefusal, APipelineSaysTheSameOfADamagedTree) {
  for (const auto& [pointer, value] : std::map<std::string, json>{{"/graph_module/module_call_graph/1/fqn", 5},
                                                                  {"/graph_module/module_call_graph/2/fqn", nullptr}}) {
    EditedFile file("mlp");
    file.set(kProgram, pointer, value);
    EXPECT_THAT(file.said(), AllOf(StartsWith("the program \"model\": "), EndsWith(kAgain))) << pointer;
    EXPECT_EQ(file.said_by_pipeline(), file.said()) << pointer;
  }
}

// The second file of a pipeline is checked as that of a module.
TEST(ExportedRefusal, APipelineSaysTheSameOfAFileForEval) {
  const char* const kTrains = "/graph_module/graph/nodes/2/inputs/2/arg/as_bool";  // of the dropout
  const char* const kParameter = "/graph_module/signature/input_specs/1/parameter/parameter_name";
  // Both files store a tensor that the program of the first one does not have.
  const auto add_shift = [](EditedFile& file) {
    json weights = json::parse(file[kWeights]);
    weights["config"]["body.0.shift"] = weights["config"]["body.0.bias"];
    file[kWeights] = weights.dump();
  };
  const auto expect = [&](const auto& change, const std::string& says) {
    EditedFile first("mlp");
    EditedFile eval("mlp");
    for (EditedFile* const file : {&first, &eval}) add_shift(*file);
    eval.set(kProgram, kTrains, false);
    change(eval);
    const test::ScratchFolder folder;
    const ExportedOptions options{.eval = eval.write(folder)};
    EXPECT_THAT(first.said(options), HasSubstr(says));
    EXPECT_THAT(first.said_by_pipeline(options), HasSubstr(says));
  };
  expect([](EditedFile& /*unchanged*/) {}, "no error");
  expect([&](EditedFile& eval) { eval.set(kProgram, kTrains, true); },
         "was exported in train(), and is named as the program for eval()");
  expect([&](EditedFile& eval) { eval.set(kWeights, "/config/body.0.bias/tensor_meta/sizes/0/as_int", 12); },
         "\"body.0.bias\" is [12], in the first file [24]; export both from one model");
  expect([&](EditedFile& eval) { eval.set(kProgram, kParameter, "body.0.shift"); },
         "the first file has no tensor \"body.0.shift\"; export both from one model");
  expect(
      [](EditedFile& eval) {
        const char* const kNames = "/graph_module/module_call_graph/0/signature/in_spec";
        auto names = json::parse(eval[kProgram]).at(json::json_pointer(kNames)).get<std::string>();
        names.at(names.find("\\\"x") + 2) = 'y';  // in a text within the text
        eval.set(kProgram, kNames, names);
      },
      "has the inputs y; expected those of ");
}

// The loss of either program of a pipeline is looked for when the files are read.
TEST(ExportedRefusal, AFileForEvalHasTheLossToo) {
  EditedFile eval("hf_llama");
  const char* const kNames = "/graph_module/module_call_graph/0/signature/out_spec";
  auto names = json::parse(eval[kProgram]).at(json::json_pointer(kNames)).get<std::string>();
  names.replace(names.find("loss"), 4, "cost");
  eval.set(kProgram, kNames, names);
  const test::ScratchFolder folder;
  ExportedPipelineOptions options{.labels = {"labels"}};
  options.file.eval = eval.write(folder);
  EXPECT_EQ(test::thrown_by<UsageError>([&] { load_exported_pipeline(kPrefix + "hf_llama.pt2", options); }),
            options.file.eval +
                ": has no output \"loss\" that is the loss; it returns cost, logits. Name it in "
                "ExportedPipelineOptions::loss, or give a loss function in .pipeline.loss");
}

TEST(ExportedRefusal, GraphsInOneAnotherHaveALimit) {
  EditedFile file("pieces");
  const json outer = json::parse(file[kProgram]).at("/graph_module/graph/nodes/1"_json_pointer);
  json node = outer;
  for (int depth = 0; depth < 17; ++depth) {
    json next = outer;
    next["inputs"][1]["arg"]["as_graph"]["graph"]["nodes"] = json::array({node});
    next["inputs"][1]["arg"]["as_graph"]["graph"]["outputs"] = json::array();
    node = next;
  }
  file.set(kProgram, "/graph_module/graph/nodes/1", node);
  EXPECT_THAT(file.said(), HasSubstr("has values more than 100 levels deep"));
}

}  // namespace
}  // namespace ds
