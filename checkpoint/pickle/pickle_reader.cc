#include "checkpoint/pickle/pickle_reader.h"

#include <bit>
#include <charconv>
#include <unordered_map>
#include <utility>

#include "checkpoint/pickle/pickle_cursor.h"
#include "checkpoint/pickle/pickle_objects.h"
#include "checkpoint/pickle/pickle_opcodes.h"

namespace ds::checkpoint {
namespace {

constexpr int kNewestProtocol = 5;

// The stack machine that a pickle is a program for.
class PickleMachine {
  using enum pickle::Opcode;

 public:
  PickleMachine(std::span<const uint8_t> bytes, const std::string& where, std::deque<PickleValue>& values)
      : cursor_(bytes, where), objects_(cursor_, values) {}

  const PickleValue* run() {
    uint8_t code = kStop;
    if (cursor_.size() > 0) code = cursor_.next_code();
    cursor_.check(code == kProto, "expected a pickle of protocol 2 or newer");
    for (; code != kStop; code = cursor_.next_code()) {
      if (!run_scalar(code) && !run_text(code) && !run_stack(code) && !run_container(code) && !run_memo(code) &&
          !run_object(code)) {
        cursor_.fail(cat("opcode ", static_cast<int>(code), ", which torch.save does not write"));
      }
    }
    return pop();
  }

 private:
  // --- stack -------------------------------------------------------------------------------------------------------
  PickleValue* push(PickleValue* value) {
    stack_.push_back(value);
    return value;
  }
  PickleValue* push(PickleKind kind) { return push(objects_.make(kind)); }
  PickleValue* push_text(PickleKind kind, std::string text) {
    PickleValue* value = push(kind);
    value->text = std::move(text);
    return value;
  }
  void push_integer(int64_t integer) { push(PickleKind::kInt)->integer = integer; }
  PickleValue* top() const {
    cursor_.check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "nothing on the stack");
    return stack_.back();
  }
  PickleValue* pop() {
    PickleValue* value = top();
    stack_.pop_back();
    return value;
  }
  PickleItems pop_to_mark() {
    cursor_.check(!marks_.empty(), "no mark on the stack");
    PickleItems items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  PickleValue* pop(PickleKind kind, const char* what) {
    PickleValue* value = pop();
    cursor_.check(value->is(kind), what);
    return value;
  }

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
        push(PickleKind::kNone);
        return true;
      case kNewTrue:
        push(PickleKind::kBool)->integer = 1;
        return true;
      case kNewFalse:
        push(PickleKind::kBool);
        return true;
      case kBinInt:
        push_integer(static_cast<int32_t>(cursor_.take_number(4)));
        return true;
      case kBinInt1:
        push_integer(static_cast<int64_t>(cursor_.take_number(1)));
        return true;
      case kBinInt2:
        push_integer(static_cast<int64_t>(cursor_.take_number(2)));
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
        push(PickleKind::kFloat)->number = std::bit_cast<double>(bits);
        return true;
      }
      default:
        return false;
    }
  }

  bool run_text(uint8_t code) {
    switch (code) {
      case kBinUnicode:
        push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinUnicode:
        push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinUnicode8:
        push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(8)));
        return true;
      case kBinString:
        push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinString:
        push_text(PickleKind::kString, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinBytes:
        push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(4)));
        return true;
      case kShortBinBytes:
        push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(1)));
        return true;
      case kBinBytes8:
      case kByteArray8:
        push_text(PickleKind::kBytes, cursor_.take_text(cursor_.take_number(8)));
        return true;
      default:
        return false;
    }
  }

  bool run_stack(uint8_t code) {
    switch (code) {
      case kMark:
        marks_.push_back(stack_.size());
        return true;
      case kPop:
        if (!marks_.empty() && marks_.back() == stack_.size()) {
          marks_.pop_back();
        } else {
          pop();
        }
        return true;
      case kPopMark:
        pop_to_mark();
        return true;
      case kDup:
        push(top());
        return true;
      default:
        return false;
    }
  }

  bool run_container(uint8_t code) {
    switch (code) {
      case kEmptyList:
        push(PickleKind::kList);
        return true;
      case kEmptyTuple:
        push(PickleKind::kTuple);
        return true;
      case kEmptyDict:
        push(PickleKind::kDict);
        return true;
      case kEmptySet:
        push(PickleKind::kSet);
        return true;
      case kListCode:
        push_items(PickleKind::kList, pop_to_mark());
        return true;
      case kTupleCode:
        push_items(PickleKind::kTuple, pop_to_mark());
        return true;
      case kFrozenSet:
        push_items(PickleKind::kSet, pop_to_mark());
        return true;
      case kTuple1:
        push_tuple(1);
        return true;
      case kTuple2:
        push_tuple(2);
        return true;
      case kTuple3:
        push_tuple(3);
        return true;
      case kDictCode: {
        const PickleItems items = pop_to_mark();
        set_items(push(PickleKind::kDict), items);
        return true;
      }
      case kAppend: {
        const PickleValue* item = pop();
        append(top(), {item});
        return true;
      }
      case kAppends:
      case kAddItems: {
        const PickleItems items = pop_to_mark();
        append(top(), items);
        return true;
      }
      case kSetItem: {
        const PickleValue* value = pop();
        const PickleValue* key = pop();
        set_items(top(), {key, value});
        return true;
      }
      case kSetItems: {
        const PickleItems items = pop_to_mark();
        set_items(top(), items);
        return true;
      }
      default:
        return false;
    }
  }

  bool run_memo(uint8_t code) {
    switch (code) {
      case kPut:
        memo_[line_number()] = top();
        return true;
      case kBinPut:
        memo_[cursor_.take_number(1)] = top();
        return true;
      case kLongBinPut:
        memo_[cursor_.take_number(4)] = top();
        return true;
      case kMemoize:
        memo_[memo_.size()] = top();
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
        push_text(PickleKind::kClass, objects_.class_name(module, cursor_.take_line()));
        return true;
      }
      case kStackGlobal: {
        const PickleValue* name = pop(PickleKind::kString, "a class name that is no string");
        const PickleValue* module = pop(PickleKind::kString, "a module name that is no string");
        push_text(PickleKind::kClass, objects_.class_name(module->text, name->text));
        return true;
      }
      case kBinPersId:
        push(objects_.storage(*pop()));
        return true;
      case kReduce: {
        const PickleValue* arguments = pop(PickleKind::kTuple, "a call whose arguments are no tuple");
        const PickleValue* function = pop();
        push(objects_.call(*function, *arguments));
        return true;
      }
      case kNewObjEx:
      case kNewObj: {
        if (code == kNewObjEx) pop(PickleKind::kDict, "keyword arguments that are no dict");
        const PickleValue* arguments = pop(PickleKind::kTuple, "an object whose arguments are no tuple");
        const PickleValue* type = pop(PickleKind::kClass, "an object of what is no class");
        push(objects_.made_new(*type, *arguments));
        return true;
      }
      case kInst: {
        const std::string module = cursor_.take_line();
        const std::string type = objects_.class_name(module, cursor_.take_line());
        push(objects_.object(type, pop_to_mark()));
        return true;
      }
      case kObj: {
        PickleItems items = pop_to_mark();
        cursor_.check(!items.empty() && items[0]->is(PickleKind::kClass), "an object of what is no class");
        const std::string type = items[0]->text;
        items.erase(items.begin());
        push(objects_.object(type, std::move(items)));
        return true;
      }
      case kBuild: {
        const PickleValue* state = pop();
        top()->state = state;
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
      std::string& text = push(PickleKind::kBigInt)->text;
      for (size_t i = count; i-- > 0;)
        text += "0123456789abcdef"[taken[i] >> 4], text += "0123456789abcdef"[taken[i] & 15];
      return;
    }
    uint64_t bits = count > 0 && taken[count - 1] >= 0x80 ? ~uint64_t{0} : 0;
    for (size_t i = count; i-- > 0;) bits = bits << 8 | taken[i];
    push_integer(static_cast<int64_t>(bits));
  }

  void push_decimal(std::string line) {
    if (line == "00" || line == "01") {
      push(PickleKind::kBool)->integer = line == "01" ? 1 : 0;
      return;
    }
    if (!line.empty() && line.back() == 'L') line.pop_back();
    int64_t integer = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), integer);
    if (error == std::errc::result_out_of_range) {
      push_text(PickleKind::kBigInt, line);
      return;
    }
    cursor_.check(error == std::errc() && end == line.data() + line.size(), "an integer that is none");
    push_integer(integer);
  }

  void push_float_line(const std::string& line) {
    double number = 0.0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    cursor_.check(error == std::errc() && end == line.data() + line.size(), "a float that is none");
    push(PickleKind::kFloat)->number = number;
  }

  void push_items(PickleKind kind, PickleItems items) { push(kind)->items = std::move(items); }

  void push_tuple(size_t count) {
    PickleItems items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push_items(PickleKind::kTuple, std::move(items));
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
    push(found->second);
  }

  PickleCursor cursor_;
  PickleObjects objects_;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

}  // namespace

Pickle::Pickle(std::span<const uint8_t> bytes, const std::string& where)
    : root_(PickleMachine(bytes, where, values_).run()) {}

}  // namespace ds::checkpoint
