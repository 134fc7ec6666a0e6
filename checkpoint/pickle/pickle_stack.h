// The stack of the machine that runs a pickle: values, and marks from which on several values are taken at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/pickle/pickle_cursor.h"
#include "checkpoint/pickle/pickle_objects.h"
#include "checkpoint/pickle/pickle_value.h"

namespace ds::checkpoint {

// Refers to values that PickleObjects owns. Taking what is not there throws as PickleCursor; values below the last mark
// are out of reach until the mark is taken.
class PickleStack {
 public:
  // Both outlive it.
  PickleStack(const PickleCursor& cursor, PickleObjects& objects) : cursor_(cursor), objects_(objects) {}

  PickleValue* push(PickleValue* value) {
    values_.push_back(value);
    return value;
  }
  // A new value of this kind.
  PickleValue* push(PickleKind kind) { return push(objects_.make(kind)); }
  void push_text(PickleKind kind, std::string text) { push(kind)->text = std::move(text); }
  void push_integer(int64_t integer) { push(PickleKind::kInt)->integer = integer; }
  void push_items(PickleKind kind, PickleItems items) { push(kind)->items = std::move(items); }

  PickleValue* top() const {
    cursor_.check(values_.size() > (marks_.empty() ? 0 : marks_.back()), "nothing on the stack");
    return values_.back();
  }
  PickleValue* pop() {
    PickleValue* value = top();
    values_.pop_back();
    return value;
  }
  // `what` is the text of the error when the value is of another kind.
  PickleValue* pop(PickleKind kind, const char* what) {
    PickleValue* value = pop();
    cursor_.check(value->is(kind), what);
    return value;
  }
  // The last `count` values, in the order in which they were pushed.
  PickleItems pop_items(size_t count) {
    PickleItems items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }

  void mark() { marks_.push_back(values_.size()); }
  // The values above the last mark, which goes with them.
  PickleItems pop_to_mark() {
    cursor_.check(!marks_.empty(), "no mark on the stack");
    PickleItems items(values_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), values_.end());
    values_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  // The last value, or the last mark where no value is above it.
  void pop_value_or_mark() {
    if (!marks_.empty() && marks_.back() == values_.size()) {
      marks_.pop_back();
    } else {
      pop();
    }
  }

 private:
  const PickleCursor& cursor_;
  PickleObjects& objects_;
  std::vector<PickleValue*> values_;
  std::vector<size_t> marks_;
};

}  // namespace ds::checkpoint
