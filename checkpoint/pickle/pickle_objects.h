// The objects of a pickle: what the standard library and torch put plain values and tensors together with becomes
// these, objects of other classes stay names with their state, and a call of anything unknown is refused. Nothing is
// run.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "checkpoint/pickle/pickle_cursor.h"
#include "checkpoint/pickle/pickle_value.h"

namespace ds::checkpoint {

using PickleItems = std::vector<const PickleValue*>;

// Makes values in `values`. Throws as PickleCursor.
class PickleObjects {
 public:
  // Both outlive it.
  PickleObjects(const PickleCursor& cursor, std::deque<PickleValue>& values) : cursor_(cursor), values_(values) {}

  PickleValue* make(PickleKind kind);
  // module.name
  std::string class_name(const std::string& module, const std::string& name) const;
  // What the call of a class or function with a tuple of arguments gives. Throws for one that is not known
  // (checkpoint/pickle/known_callables.h).
  PickleValue* call(const PickleValue& function, const PickleValue& arguments);
  // What a class makes of a tuple of arguments by __new__.
  PickleValue* made_new(const PickleValue& type, const PickleValue& arguments);
  PickleValue* object(const std::string& type, PickleItems arguments);
  void require_known(const std::string& name) const;
  // The storage that a persistent id ("storage", class, key, location, numel) stands for.
  PickleValue* storage(const PickleValue& id);

 private:
  // What is copied out of values that a pickle can name again and again: without a limit a small file could fill the
  // memory.
  void spend(size_t parts);
  // Null when it is none.
  PickleValue* plain_container(const std::string& type, const PickleItems& arguments);
  PickleValue* dict_of_pairs(const PickleItems& arguments);
  PickleValue* latin1_bytes(const PickleValue& text);
  // The tensor made of storage, offset, sizes and strides, which further parts follow that do not matter here.
  PickleValue* tensor(const PickleItems& parts);
  std::vector<int64_t> numbers(const PickleValue& tuple) const;

  const PickleCursor& cursor_;
  std::deque<PickleValue>& values_;
  size_t copied_ = 0;
};

}  // namespace ds::checkpoint
