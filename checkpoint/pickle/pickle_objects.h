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

// Makes values in `values`. Throws IoError as PickleCursor does.
class PickleObjects {
 public:
  // Both arguments outlive it.
  PickleObjects(const PickleCursor& cursor, std::deque<PickleValue>& values) : cursor_(cursor), values_(values) {}

  PickleValue* make(PickleKind kind);
  // Returns "module.name".
  std::string class_name(const std::string& module, const std::string& name) const;
  // Returns the result of calling a class or function with a tuple of arguments. Throws for one that is not known.
  PickleValue* call(const PickleValue& function, const PickleValue& arguments);
  // Returns the object that a class makes of a tuple of arguments by __new__.
  PickleValue* made_new(const PickleValue& type, const PickleValue& arguments);
  PickleValue* object(const std::string& type, PickleItems arguments);
  void require_known(const std::string& name) const;
  // Returns the storage that a persistent id ("storage", class, key, location, numel) stands for.
  PickleValue* storage(const PickleValue& id);

 private:
  // Counts what is copied out of values that a pickle can name again and again: without a limit a small file could fill
  // the memory.
  void spend(size_t parts);
  // Returns a dict, list or set of the standard library; null when `type` is none.
  PickleValue* plain_container(const std::string& type, const PickleItems& arguments);
  PickleValue* dict_of_pairs(const PickleItems& arguments);
  PickleValue* latin1_bytes(const PickleValue& text);
  // Returns the tensor made of storage, offset, sizes and strides, which further parts follow that do not matter here.
  PickleValue* tensor(const PickleItems& parts);
  std::vector<int64_t> numbers(const PickleValue& tuple) const;

  const PickleCursor& cursor_;
  std::deque<PickleValue>& values_;
  size_t copied_ = 0;
};

}  // namespace ds::checkpoint
