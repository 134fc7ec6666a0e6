#include "dsengine/collate.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "core/check.h"
#include "core/tensor_check.h"
#include "data/read_workers.h"

namespace ds::data {
namespace {

bool all_of_kind(const std::vector<c10::IValue>& samples, bool (c10::IValue::*is_kind)() const) {
  return std::all_of(samples.begin(), samples.end(),
                     [is_kind](const c10::IValue& value) { return (value.*is_kind)(); });
}

template <class T, class Get>
std::vector<T> values_of(const std::vector<c10::IValue>& samples, const Get& get) {
  std::vector<T> values;
  values.reserve(samples.size());
  for (const c10::IValue& sample : samples) values.push_back(get(sample));
  return values;
}

// Collates place after place of samples that are lists or tuples.
std::vector<c10::IValue> collate_places(const std::vector<std::vector<c10::IValue>>& samples, const std::string& where,
                                        const char* what) {
  std::vector<c10::IValue> result;
  for (size_t i = 1; i < samples.size(); ++i) {
    require_same_structure(samples[i].size() == samples.front().size(), i, where, what);
  }
  for (size_t place = 0; place < samples.front().size(); ++place) {
    std::vector<c10::IValue> values;
    for (const auto& sample : samples) values.push_back(sample[place]);
    result.push_back(collate_values(values, cat(where, "[", place, "]")));
  }
  return result;
}

c10::IValue collate_dicts(const std::vector<c10::IValue>& samples, const std::string& where) {
  const auto first = samples.front().toGenericDict();
  require(first.keyType()->kind() == c10::StringType::Kind, "data loader: expected texts as keys of ", where,
          ", found keys of ", first.keyType()->str(), "; use texts, or give the loader a collate function");
  c10::impl::GenericDict result(c10::StringType::get(), c10::AnyType::get());
  for (const auto& entry : first) {
    std::vector<c10::IValue> values;
    for (size_t i = 0; i < samples.size(); ++i) {
      const auto dict = samples[i].toGenericDict();
      require_same_structure(dict.size() == first.size() && dict.contains(entry.key()), i, where,
                             "dicts with the same keys");
      values.push_back(dict.at(entry.key()));
    }
    result.insert(entry.key(), collate_values(values, cat(where, "[\"", entry.key().toStringRef(), "\"]")));
  }
  return result;
}

c10::impl::GenericList list_of(const std::vector<c10::IValue>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& value : values) list.push_back(value);
  return list;
}

}  // namespace

at::Tensor stack_samples(const std::vector<at::Tensor>& samples, const std::string& where) {
  const auto defined = std::count_if(samples.begin(), samples.end(), [](const at::Tensor& t) { return t.defined(); });
  require(defined == 0 || static_cast<size_t>(defined) == samples.size(), "data loader: ", defined, " of ",
          samples.size(), " samples of a batch have a tensor as ", where, "; expected all or none");
  if (defined == 0) return {};
  for (size_t i = 1; i < samples.size(); ++i) {
    require(samples[i].sizes() == samples[0].sizes() && samples[i].scalar_type() == samples[0].scalar_type(),
            "data loader: samples of one batch must have one shape and dtype; ", where, " of ", name_in_batch(0),
            " is ", describe(samples[0]), ", of ", name_in_batch(i), " ", describe(samples[i]),
            "; pad them in the dataset's get(), or in a collate function");
  }
  return at::stack(samples, 0);
}

void require_same_structure(bool is_same, size_t place, const std::string& where, const char* what) {
  require(is_same, "data loader: expected ", what, " as ", where, " in all samples of a batch; ", name_in_batch(place),
          " differs from ", name_in_batch(0), "; give the loader a collate function");
}

c10::IValue collate_values(const std::vector<c10::IValue>& samples, const std::string& where) {
  using c10::IValue;
  if (all_of_kind(samples, &IValue::isTensor)) {
    return stack_samples(values_of<at::Tensor>(samples, [](const IValue& v) { return v.toTensor(); }), where);
  }
  if (all_of_kind(samples, &IValue::isBool)) {
    return at::tensor(values_of<int64_t>(samples, [](const IValue& v) { return v.toBool() ? 1 : 0; })).to(at::kBool);
  }
  if (all_of_kind(samples, &IValue::isInt)) {
    return at::tensor(values_of<int64_t>(samples, [](const IValue& v) { return v.toInt(); }));
  }
  if (all_of_kind(samples, &IValue::isDouble)) {
    return at::tensor(values_of<double>(samples, [](const IValue& v) { return v.toDouble(); }), at::kDouble);
  }
  if (all_of_kind(samples, &IValue::isString)) return list_of(samples);
  using Elements = std::vector<IValue>;
  if (all_of_kind(samples, &IValue::isTuple)) {
    const auto tuples = values_of<Elements>(samples, [](const IValue& v) { return v.toTupleRef().elements().vec(); });
    return c10::ivalue::Tuple::create(collate_places(tuples, where, "tuples of one length"));
  }
  if (all_of_kind(samples, &IValue::isList)) {
    const auto lists = values_of<Elements>(samples, [](const IValue& v) { return v.toListRef().vec(); });
    return list_of(collate_places(lists, where, "lists of one length"));
  }
  if (all_of_kind(samples, &IValue::isGenericDict)) return collate_dicts(samples, where);
  throw UsageError(cat("data loader: expected values of one kind as ", where,
                       ": tensors, numbers, texts, tuples, lists or dicts; found ", samples.front().tagKind(), " in ",
                       name_in_batch(0), " and ", samples.back().tagKind(), " in ", name_in_batch(samples.size() - 1),
                       "; give the loader a collate function"));
}

c10::IValue map_value(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) elements.push_back(map_value(element, function));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict result(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) result.insert(entry.key(), map_value(entry.value(), function));
    return result;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList result(list.elementType());
    for (const c10::IValue& element : value.toListRef()) result.push_back(map_value(element, function));
    return result;
  }
  return value;
}

at::Tensor Collated<at::Tensor>::of(const std::vector<at::Tensor>& samples, const std::string& where) {
  return stack_samples(samples, where);
}

c10::IValue Collated<c10::IValue>::of(const std::vector<c10::IValue>& samples, const std::string& where) {
  return collate_values(samples, where);
}

}  // namespace ds::data
