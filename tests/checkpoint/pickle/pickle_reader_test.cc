// Pickles by hand: every opcode that torch.save may write, and what no pickle should do to its reader.
#include "checkpoint/pickle/pickle_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Pickle pickle_of(const std::string& code) {
  const std::string whole = "\x80\x02" + code;
  return Pickle({reinterpret_cast<const uint8_t*>(whole.data()), whole.size()}, "file.pt");
}

std::string error_of(const std::string& code) {
  return test::thrown_by<IoError>([&] { pickle_of(code); });
}

std::string bytes(std::initializer_list<int> values) {
  std::string result;
  for (const int value : values) result += static_cast<char>(value);
  return result;
}

// A storage of 6 float32 on the stack.
const std::string kStorage = "(X" + bytes({7, 0, 0, 0}) + "storagectorch\nFloatStorage\nX" + bytes({1, 0, 0, 0}) +
                             "0X" + bytes({3, 0, 0, 0}) + "cpuK" + bytes({6}) + "tQ";

// torch._utils._rebuild_tensor_v2(storage, offset, sizes, strides, False, {}).
std::string tensor_code(int offset, const std::string& sizes, const std::string& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(" + kStorage + "K" + bytes({offset}) + sizes + strides + "\x89}tR.";
}

TEST(PickleReader, ReadsNumbers) {
  EXPECT_EQ(pickle_of("J" + bytes({0xfe, 0xff, 0xff, 0xff}) + ".").root().integer, -2);
  EXPECT_EQ(pickle_of("K" + bytes({200}) + ".").root().integer, 200);
  EXPECT_EQ(pickle_of("M" + bytes({1, 2}) + ".").root().integer, 513);
  EXPECT_EQ(pickle_of("\x8a" + bytes({2, 0, 0x80}) + ".").root().integer, -32768);
  EXPECT_EQ(pickle_of("\x8a" + bytes({0}) + ".").root().integer, 0);
  EXPECT_EQ(pickle_of("I-7\n.").root().integer, -7);
  EXPECT_EQ(pickle_of("L123456789012L\n.").root().integer, 123456789012);
  EXPECT_TRUE(pickle_of("L99999999999999999999L\n.").root().is(PickleKind::kBigInt));
  EXPECT_EQ(pickle_of("\x8a" + bytes({9, 0, 0, 0, 0, 0, 0, 0, 0, 1}) + ".").root().text, "010000000000000000");
  EXPECT_EQ(pickle_of("G" + bytes({0xbf, 0xf8, 0, 0, 0, 0, 0, 0}) + ".").root().number, -1.5);
  EXPECT_EQ(pickle_of("F2.5\n.").root().number, 2.5);
  EXPECT_TRUE(pickle_of("I01\n.").root().is(PickleKind::kBool));
}

TEST(PickleReader, ReadsContainers) {
  const Pickle list = pickle_of("](K" + bytes({1}) + "K" + bytes({2}) + "eNa.");
  ASSERT_EQ(list.root().items.size(), 3);
  EXPECT_EQ(list.root().items[1]->integer, 2);
  EXPECT_TRUE(list.root().items[2]->is(PickleKind::kNone));
  EXPECT_EQ(pickle_of("NNN\x87.").root().items.size(), 3);
  EXPECT_EQ(pickle_of("(NNt.").root().items.size(), 2);
  EXPECT_EQ(pickle_of("NN0.").root().kind, PickleKind::kNone);
  EXPECT_EQ(pickle_of("N(NN1.").root().kind, PickleKind::kNone);
  EXPECT_EQ(pickle_of("\x8f(NN\x90.").root().items.size(), 2);
  const Pickle dict =
      pickle_of("}(\x8c" + bytes({1}) + "aK" + bytes({4}) + "\x8c" + bytes({1}) + "aK" + bytes({5}) + "u.");
  EXPECT_EQ(dict.root().find("a")->integer, 5) << "of equal keys the last counts";
  EXPECT_EQ(dict.root().find("b"), nullptr);
}

TEST(PickleReader, RecallsTheMemo) {
  const Pickle pickle = pickle_of("(]q" + bytes({7}) + "h" + bytes({7}) + "\x94j" + bytes({1, 0, 0, 0}) + "t.");
  ASSERT_EQ(pickle.root().items.size(), 3);
  EXPECT_EQ(pickle.root().items[0], pickle.root().items[1]);
  EXPECT_EQ(pickle.root().items[0], pickle.root().items[2]);
}

// Nothing would be run; a file that asks for it is refused all the same, and says what it wanted.
TEST(PickleReader, RefusesCallsOfWhatIsNotKnown) {
  const std::string boom = "\x8c" + bytes({4}) + "boom";
  EXPECT_THAT(error_of("cos\nsystem\n" + boom + "\x85R."),
              AllOf(HasSubstr("file.pt: byte 20"), HasSubstr("call os.system"), HasSubstr("nothing was run")));
  EXPECT_THAT(error_of("\x8c" + bytes({5}) + "posix\x8c" + bytes({6}) + "system\x93" + boom + "\x85R."),
              HasSubstr("call posix.system"));
  EXPECT_THAT(error_of("(" + boom + "ios\nsystem\n."), HasSubstr("call os.system"));
  EXPECT_THAT(error_of("(cos\nsystem\n" + boom + "o."), HasSubstr("call os.system"));
  EXPECT_THAT(error_of("c__builtin__\neval\n" + boom + "\x85R."), HasSubstr("call __builtin__.eval"));
  EXPECT_THAT(error_of("cbuiltins\ngetattr\n" + boom + "\x85R."), HasSubstr("call builtins.getattr"));
  EXPECT_THAT(error_of("ctorch.storage\n_load_from_bytes\n" + boom + "\x85R."), HasSubstr("_load_from_bytes"));
  EXPECT_THAT(error_of("ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nN)Nt" + std::string("R.")),
              HasSubstr("call os.system"));
  EXPECT_THAT(error_of("cos\n" + std::string(500, '\x1b') + "\n)R."), Not(HasSubstr("\x1b")));
  EXPECT_THAT(error_of(boom + ")R."), HasSubstr("a call of what is no class or function"));
  EXPECT_EQ(error_of("c__builtin__\nset\n)R."), "no error");
  EXPECT_EQ(error_of("cnumpy.core.multiarray\nscalar\n)R."), "no error");
}

TEST(PickleReader, LeavesUnknownClassesAsTheyAre) {
  const Pickle pickle = pickle_of("ca.b\nC\n\x8c" + bytes({4}) + "boom\x85\x81}\x8c" + bytes({1}) + "aNsb.");
  EXPECT_TRUE(pickle.root().is(PickleKind::kObject));
  EXPECT_EQ(pickle.root().text, "a.b.C");
  EXPECT_EQ(pickle.root().items[0]->text, "boom");
  EXPECT_TRUE(pickle.root().attribute("a")->is(PickleKind::kNone));
  EXPECT_EQ(pickle.root().attribute("b"), nullptr);
  EXPECT_EQ(pickle_of("ca.b\nC\n)\x81.").root().in_words(), "an object of class a.b.C");
  EXPECT_EQ(pickle_of("\x8c" + bytes({5}) + "torch\x8c" + bytes({5}) + "int64\x93.").root().in_words(),
            "the class torch.int64");
}

TEST(PickleReader, ReadsTensors) {
  const Pickle pickle = pickle_of(
      tensor_code(1, "K" + bytes({2}) + "K" + bytes({2}) + "\x86", "K" + bytes({1}) + "K" + bytes({3}) + "\x86"));
  ASSERT_TRUE(pickle.root().is(PickleKind::kTensor));
  const TensorReference& tensor = *pickle.root().tensor;
  EXPECT_EQ(tensor.storage, "0");
  EXPECT_EQ(tensor.dtype, at::kFloat);
  EXPECT_EQ(tensor.offset, 1);
  EXPECT_EQ(tensor.sizes, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(tensor.strides, (std::vector<int64_t>{1, 3}));
  EXPECT_FALSE(tensor.contiguous());
}

TEST(PickleReader, RefusesTensorsOutsideTheirStorage) {
  const std::string one = "K" + bytes({1}) + "\x85";
  EXPECT_EQ(error_of(tensor_code(0, "K" + bytes({6}) + "\x85", one)), "no error");
  EXPECT_THAT(error_of(tensor_code(0, "K" + bytes({7}) + "\x85", one)), HasSubstr("does not fit its storage"));
  EXPECT_THAT(error_of(tensor_code(6, "K" + bytes({1}) + "\x85", one)), HasSubstr("does not fit its storage"));
  const std::string repeated = "K" + bytes({0}) + "\x85";
  EXPECT_EQ(error_of(tensor_code(0, "K" + bytes({200}) + "\x85", repeated)), "no error");
  EXPECT_THAT(error_of(tensor_code(0, "J" + bytes({0, 0, 1, 0}) + "\x85", repeated)),
              HasSubstr("does not fit its storage"));
  const std::string large = "\x8a" + bytes({8, 0, 0, 0, 0, 0, 0, 0, 0x7f});
  EXPECT_THAT(error_of(tensor_code(0, large + large + "\x86", large + large + "\x86")),
              HasSubstr("does not fit its storage"));
  EXPECT_THAT(error_of(tensor_code(0, "J" + bytes({0xff, 0xff, 0xff, 0xff}) + "\x85", one)),
              HasSubstr("number from 0"));
  EXPECT_THAT(error_of(tensor_code(0, one, ")")), HasSubstr("more sizes than strides"));
  EXPECT_THAT(error_of(tensor_code(0, "N", one)), HasSubstr("no tuple"));
}

TEST(PickleReader, NamesFileAndPosition) {
  EXPECT_THAT(error_of("K"), HasSubstr("file.pt: byte 2 of its pickle: it ends 1 bytes too early"));
  EXPECT_THAT(error_of("N"), HasSubstr("byte 3"));
  EXPECT_THAT(error_of("\x8d" + std::string(8, '\xff') + "."), HasSubstr("too early"));
  EXPECT_THAT(error_of("\x8b" + std::string(4, '\xff') + "."), HasSubstr("too early"));
  EXPECT_THAT(error_of("h" + bytes({9}) + "."), HasSubstr("memo 9 was never written"));
  EXPECT_THAT(error_of("."), HasSubstr("nothing on the stack"));
  EXPECT_THAT(error_of("(0."), HasSubstr("nothing on the stack"));
  EXPECT_THAT(error_of("e."), HasSubstr("no mark"));
  EXPECT_THAT(error_of("NNa."), HasSubstr("appends to what is no list"));
  EXPECT_THAT(error_of("}(Nu."), HasSubstr("a key without a value"));
  EXPECT_THAT(error_of("V\n."), HasSubstr("opcode 86"));
  EXPECT_THAT(error_of("NQ."), HasSubstr("no storage of torch.save"));
  EXPECT_THAT(error_of("cno newline"), HasSubstr("ends inside a line"));
  const std::string old = "I1\n.";
  EXPECT_THROW(Pickle({reinterpret_cast<const uint8_t*>(old.data()), old.size()}, "f"), IoError);
  EXPECT_THROW(Pickle({}, "f"), IoError);
}

TEST(PickleReader, HoldsItselfAndDeepNesting) {
  const Pickle loop = pickle_of("]q" + bytes({0}) + "h" + bytes({0}) + "a.");
  EXPECT_EQ(loop.root().items[0], &loop.root());
  EXPECT_FALSE(plain_json(loop.root()));
  const Pickle deep = pickle_of(std::string(1'000'000, ']') + std::string(999'999, 'a') + ".");
  EXPECT_FALSE(plain_json(deep.root()));
  std::string doubling = "]";  // every list holds the one before twice: 2^40 parts
  for (int i = 0; i < 40; ++i) doubling += "q" + bytes({i}) + "0](h" + bytes({i}) + "h" + bytes({i}) + "e";
  EXPECT_FALSE(plain_json(pickle_of(doubling + ".").root()));
}

TEST(PickleReader, MemoryStaysLinear) {
  std::string code = "(" + std::string(100'000, 'N') + "tq" + bytes({0}) + "0";
  for (int i = 0; i < 100'000; ++i) code += "cA\nB\nh" + bytes({0}) + "\x81" + "0";
  EXPECT_THAT(error_of(code + "N."), HasSubstr("repeats its values too often"));
  EXPECT_THAT(error_of("c" + std::string(2000, 'm') + "\nB\n."), HasSubstr("more than 1000 characters"));
}

TEST(PickleReader, PlainJson) {
  const Pickle pickle = pickle_of("}(\x8c" + bytes({1}) + "a(K" + bytes({1}) + "\x88Nt\x8c" + bytes({1}) + "bG" +
                                  bytes({0x3f, 0xf0, 0, 0, 0, 0, 0, 0}) + "K" + bytes({3}) + "]u.");
  EXPECT_EQ(plain_json(pickle.root()), nlohmann::json::parse(R"({"a": [1, true, null], "b": 1.0, "3": []})"));
  EXPECT_FALSE(plain_json(pickle_of("ca\nb\n.").root()));
  EXPECT_FALSE(plain_json(pickle_of("G" + bytes({0x7f, 0xf0, 0, 0, 0, 0, 0, 0}) + ".").root())) << "infinite";
  EXPECT_FALSE(plain_json(pickle_of("\x8c" + bytes({1, 0xff}) + ".").root())) << "no UTF-8";
}

TEST(PickleReader, SurvivesNoise) {
  std::mt19937 random(7);
  const std::string opcodes =
      "(.0JKMNQRTUXabcde}ghijlotu)GBCpqrsIFL2\x80\x81\x85\x86\x87\x88\x8a\x8c\x8f\x90\x91\x92\x93\x94";
  int refused = 0;
  constexpr int kRounds = 20'000;
  for (int round = 0; round < kRounds; ++round) {
    std::string code;
    for (int i = 0; i < 60; ++i) {
      code += random() % 4 == 0 ? static_cast<char>(random()) : opcodes[random() % opcodes.size()];
    }
    if (error_of(code) != "no error") ++refused;  // which catches IoError alone
  }
  EXPECT_GT(refused, kRounds / 2);
}

}  // namespace
}  // namespace ds::checkpoint
