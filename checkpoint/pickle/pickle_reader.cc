#include "checkpoint/pickle/pickle_reader.h"

#include <bit>
#include <charconv>
#include <unordered_map>
#include <utility>

#include "checkpoint/pickle/pickle_cursor.h"
#include "checkpoint/pickle/pickle_objects.h"
#include "checkpoint/pickle/pickle_stack.h"

namespace ds::checkpoint::pickle {

// The opcodes that torch.save can write, by their names in Python's pickle.py.
enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kFloatLine = 'F',
  kIntLine = 'I',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kLongLine = 'L',
  kBinInt2 = 'M',
  kNoneCode = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kDictCode = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kGet = 'g',
  kBinGet = 'h',
  kInst = 'i',
  kLongBinGet = 'j',
  kListCode = 'l',
  kEmptyList = ']',
  kObj = 'o',
  kPut = 'p',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTupleCode = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinFloat = 'G',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

}  // namespace ds::checkpoint::pickle

namespace ds::checkpoint {
namespace {

constexpr int kNewestProtocol = 5;

// The stack machine that a pickle is a program for.
class PickleMachine {
  using enum pickle::Opcode;

 public:
  PickleMachine(std::span<const uint8_t> bytes, const std::string& where, std::deque<PickleValue>& values)
      : cursor_(bytes, where), objects_(cursor_, values), stack_(cursor_, objects_) {}

  const PickleValue* run() {
    uint8_t code = kStop;
    if (cursor_.size() > 0) code = cursor_.next_code();
    cursor_.check(code == kProto, "expected a pickle of protocol 2 or newer");
    for (; code != kStop; code = cursor_.next_code()) {
      if (!run_scalar(code) && !run_text(code) && !run_stack(code) && !run_container(code) && !run_filling(code) &&
          !run_memo(code) && !run_object(code)) {
        cursor_.fail(cat("opcode ", static_cast<int>(code), ", which torch.save does not write"));
      }
    }
    return stack_.pop();
  }

 private:
  // --- opcodes -----------------------------------------------------------------------------------------------------
  bool run_scalar(uint8_t code) {
    switch (code) {
      case kProto: {
        const uint64_t protocol = cursor_.take_number(1);
        if (protocol < 2 || protocol > kNewestProtocol) cursor_.fail(cat("protocol ", protocol, ", expected 2 to 5"));
        return true;
      }
      case kFrame:
        cursor_.take(8);
        return true;
      case kNoneCode:
        stack_.push(PickleKind::kNone);
        return true;
      case kNewTrue:
        stack_.push(PickleKind::kBool)->integer = 1;
        return true;
      case kNewFalse:
        stack_.push(PickleKind::kBool);
        return true;
      case kBinInt:
        stack_.push_integer(static_cast<int32_t>(cursor_.take_number(4)));
        return true;
      case kBinInt1:
        stack_.push_integer(static_cast<int64_t>(cursor_.take_number(1)));
        return true;
      case kBinInt2:
        stack_.push_integer(static_cast<int64_t>(cursor_.take_number(2)));
        return true;
      case kLong1:
        push_long(cursor_.take_number(1));
        return true;
      case kLong4:
        push_long(cursor_.take_number(4));
        return true;
      case kIntLine:
      case kLongLine:
        push_decimal(cursor_.take_line());
        return true;
      case kFloatLine:
        push_float_line(cursor_.take_line());
        return true;
      case kBinFloat: {
        uint64_t bits = 0;
        for (const uint8_t byte : cursor_.take(8)) bits = bits << 8 | byte;
        stack_.push(PickleKind::kFloat)->number = std::bit_cast<double>(bits);
        return true;
      }
      default:
        return false;
    }
  }

  bool run_text(uint8_t code) {
    switch (code) {
      case kBinUnicode:
        stack_.push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinUnicode:
        stack_.push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinUnicode8:
        stack_.push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(8)));
        return true;
      case kBinString:
        stack_.push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinString:
        stack_.push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinBytes:
        stack_.push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinBytes:
        stack_.push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinBytes8:
      case kByteArray8:
        stack_.push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(8)));
        return true;
      default:
        return false;
    }
  }

  bool run_stack(uint8_t code) {
    switch (code) {
      case kMark:
        stack_.mark();
        return true;
      case kPop:
        stack_.pop_value_or_mark();
        return true;
      case kPopMark:
        stack_.pop_to_mark();
        return true;
      case kDup:
        stack_.push(stack_.top());
        return true;
      default:
        return false;
    }
  }

  bool run_container(uint8_t code) {
    switch (code) {
      case kEmptyList:
        stack_.push(PickleKind::kList);
        return true;
      case kEmptyTuple:
        stack_.push(PickleKind::kTuple);
        return true;
      case kEmptyDict:
        stack_.push(PickleKind::kDict);
        return true;
      case kEmptySet:
        stack_.push(PickleKind::kSet);
        return true;
      case kListCode:
        stack_.push_items(PickleKind::kList, stack_.pop_to_mark());
        return true;
      case kTupleCode:
        stack_.push_items(PickleKind::kTuple, stack_.pop_to_mark());
        return true;
      case kFrozenSet:
        stack_.push_items(PickleKind::kSet, stack_.pop_to_mark());
        return true;
      case kTuple1:
        stack_.push_items(PickleKind::kTuple, stack_.pop_items(1));
        return true;
      case kTuple2:
        stack_.push_items(PickleKind::kTuple, stack_.pop_items(2));
        return true;
      case kTuple3:
        stack_.push_items(PickleKind::kTuple, stack_.pop_items(3));
        return true;
      case kDictCode: {
        const PickleItems items = stack_.pop_to_mark();
        set_items(stack_.push(PickleKind::kDict), items);
        return true;
      }
      default:
        return false;
    }
  }

  bool run_filling(uint8_t code) {
    switch (code) {
      case kAppend: {
        const PickleValue* item = stack_.pop();
        append(stack_.top(), {item});
        return true;
      }
      case kAppends:
      case kAddItems: {
        const PickleItems items = stack_.pop_to_mark();
        append(stack_.top(), items);
        return true;
      }
      case kSetItem: {
        const PickleItems item = stack_.pop_items(2);
        set_items(stack_.top(), item);
        return true;
      }
      case kSetItems: {
        const PickleItems items = stack_.pop_to_mark();
        set_items(stack_.top(), items);
        return true;
      }
      default:
        return false;
    }
  }

  bool run_memo(uint8_t code) {
    switch (code) {
      case kPut:
        memo_[line_number()] = stack_.top();
        return true;
      case kBinPut:
        memo_[cursor_.take_number(1)] = stack_.top();
        return true;
      case kLongBinPut:
        memo_[cursor_.take_number(4)] = stack_.top();
        return true;
      case kMemoize:
        memo_[memo_.size()] = stack_.top();
        return true;
      case kGet:
        recall(line_number());
        return true;
      case kBinGet:
        recall(cursor_.take_number(1));
        return true;
      case kLongBinGet:
        recall(cursor_.take_number(4));
        return true;
      default:
        return false;
    }
  }

  bool run_object(uint8_t code) {
    switch (code) {
      case kGlobal: {
        const std::string module = cursor_.take_line();
        stack_.push_text(PickleKind::kClass, objects_.class_name(module, cursor_.take_line()));
        return true;
      }
      case kStackGlobal: {
        const PickleValue* name = stack_.pop(PickleKind::kString, "a class name that is no string");
        const PickleValue* module = stack_.pop(PickleKind::kString, "a module name that is no string");
        stack_.push_text(PickleKind::kClass, objects_.class_name(module->text, name->text));
        return true;
      }
      case kBinPersId:
        stack_.push(objects_.storage(*stack_.pop()));
        return true;
      case kReduce: {
        const PickleValue* arguments = stack_.pop(PickleKind::kTuple, "a call whose arguments are no tuple");
        const PickleValue* function = stack_.pop();
        stack_.push(objects_.call(*function, *arguments));
        return true;
      }
      case kNewObjEx:
      case kNewObj: {
        if (code == kNewObjEx) stack_.pop(PickleKind::kDict, "keyword arguments that are no dict");
        const PickleValue* arguments = stack_.pop(PickleKind::kTuple, "an object whose arguments are no tuple");
        const PickleValue* type = stack_.pop(PickleKind::kClass, "an object of what is no class");
        stack_.push(objects_.made_new(*type, *arguments));
        return true;
      }
      case kInst: {
        const std::string module = cursor_.take_line();
        const std::string type = objects_.class_name(module, cursor_.take_line());
        objects_.require_known(type);
        stack_.push(objects_.object(type, stack_.pop_to_mark()));
        return true;
      }
      case kObj: {
        PickleItems items = stack_.pop_to_mark();
        cursor_.check(!items.empty() && items[0]->is(PickleKind::kClass), "an object of what is no class");
        const std::string type = items[0]->text;
        objects_.require_known(type);
        items.erase(items.begin());
        stack_.push(objects_.object(type, std::move(items)));
        return true;
      }
      case kBuild: {
        const PickleValue* state = stack_.pop();
        stack_.top()->state = state;
        return true;
      }
      default:
        return false;
    }
  }

  // --- values ------------------------------------------------------------------------------------------------------
  void push_long(uint64_t count) {
    const auto taken = cursor_.take(count);
    if (count > 8) {
      std::string& text = stack_.push(PickleKind::kBigInt)->text;
      for (size_t i = count; i-- > 0;)
        text += "0123456789abcdef"[taken[i] >> 4], text += "0123456789abcdef"[taken[i] & 15];
      return;
    }
    uint64_t bits = count > 0 && taken[count - 1] >= 0x80 ? ~uint64_t{0} : 0;
    for (size_t i = count; i-- > 0;) bits = bits << 8 | taken[i];
    stack_.push_integer(static_cast<int64_t>(bits));
  }

  void push_decimal(std::string line) {
    if (line == "00" || line == "01") {
      stack_.push(PickleKind::kBool)->integer = line == "01" ? 1 : 0;
      return;
    }
    if (!line.empty() && line.back() == 'L') line.pop_back();
    int64_t integer = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), integer);
    if (error == std::errc::result_out_of_range) {
      stack_.push_text(PickleKind::kBigInt, line);
      return;
    }
    cursor_.check(error == std::errc() && end == line.data() + line.size(), "an integer that is none");
    stack_.push_integer(integer);
  }

  void push_float_line(const std::string& line) {
    double number = 0.0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    cursor_.check(error == std::errc() && end == line.data() + line.size(), "a float that is none");
    stack_.push(PickleKind::kFloat)->number = number;
  }

  void append(PickleValue* list, const PickleItems& items) const {
    cursor_.check(list->is(PickleKind::kList) || list->is(PickleKind::kSet) || list->is(PickleKind::kObject),
                  "appends to what is no list");
    list->items.insert(list->items.end(), items.begin(), items.end());
  }

  void set_items(PickleValue* dict, const PickleItems& items) const {
    cursor_.check(dict->is(PickleKind::kDict) || dict->is(PickleKind::kObject), "sets items of what is no dict");
    cursor_.check(items.size() % 2 == 0, "a key without a value");
    for (size_t i = 0; i < items.size(); i += 2) dict->entries.emplace_back(items[i], items[i + 1]);
  }

  uint64_t line_number() {
    const std::string line = cursor_.take_line();
    uint64_t number = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    cursor_.check(error == std::errc() && end == line.data() + line.size(), "a memo index that is no number");
    return number;
  }

  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) cursor_.fail(cat("memo ", index, " was never written"));
    stack_.push(found->second);
  }

  PickleCursor cursor_;
  PickleObjects objects_;
  PickleStack stack_;
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

}  // namespace

Pickle::Pickle(std::span<const uint8_t> bytes, const std::string& where)
    : root_(PickleMachine(bytes, where, values_).run()) {}

}  // namespace ds::checkpoint
