// Makes a batch of samples of any structure, by the rules of torch.utils.data.default_collate.
//   tensor                        -> tensor with a new dimension 0 for the samples
//   bool, integer, float, double  -> tensor [samples] of Bool, Long, Float, Double
//   std::string                   -> std::vector<std::string>
//   std::map, std::unordered_map  -> the same with each value collated; all samples have the same keys
//   pair, tuple, array, vector    -> the same with each element collated; vectors of all samples are as long
//   torch::data::Example, Batch   -> the same with `data` and `target` collated, where there is a target
//   a struct with fields()        -> the same with each field collated, so fields are tensors and structures of these
//   c10::IValue                   -> tensors, numbers, strings, tuples, lists and dicts, by the same rules
//
// A struct tells its fields as pointers to members:
//   struct Sample {
//     at::Tensor image, label;
//     static constexpr auto fields() { return std::tuple(&Sample::image, &Sample::label); }
//   };
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ds::data {

// Stacks tensors of one shape and dtype along a new dimension 0. All or none are undefined; of undefined ones the
// result is so. Throws UsageError that names the samples that differ; `where` says which part of a sample it is.
at::Tensor stack_samples(const std::vector<at::Tensor>& samples, const std::string& where);
// Collates values of one kind.
c10::IValue collate_values(const std::vector<c10::IValue>& samples, const std::string& where);
// Applies a function to every tensor of a value.
c10::IValue map_value(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& function);
// Throws UsageError where sample number `place` of the batch has not the structure (`what`) of the first.
void require_same_structure(bool is_same, size_t place, const std::string& where, const char* what);

template <class T>
concept HasFields = requires {
  T::fields();
};
template <class T>
concept HasDataAndTarget = !HasFields<T> && requires(T & sample) {
  { sample.data } -> std::convertible_to<at::Tensor>;
};
// Collates samples of type T; `Result` is the type of a batch.
template <class T>
struct Collated;
template <class T>
using CollatedType = typename Collated<T>::Result;

template <>
struct Collated<at::Tensor> {
  using Result = at::Tensor;
  static Result of(const std::vector<at::Tensor>& samples, const std::string& where);
};

template <class T>
requires std::is_arithmetic_v<T>
struct Collated<T> {
  using Result = at::Tensor;
  static Result of(const std::vector<T>& samples, const std::string& where) {
    std::vector<c10::IValue> values;
    for (const T sample : samples) {
      if constexpr (std::same_as<T, bool>) {
        values.emplace_back(sample);
      } else if constexpr (std::is_integral_v<T>) {
        values.emplace_back(static_cast<int64_t>(sample));
      } else {
        values.emplace_back(static_cast<double>(sample));
      }
    }
    const at::Tensor result = collate_values(values, where).toTensor();
    return std::same_as<T, float> ? result.to(at::kFloat) : result;
  }
};

template <>
struct Collated<std::string> {
  using Result = std::vector<std::string>;
  static Result of(std::vector<std::string> samples, const std::string& /*where*/) { return samples; }
};

template <>
struct Collated<c10::IValue> {
  using Result = c10::IValue;
  static Result of(const std::vector<c10::IValue>& samples, const std::string& where);
};

// Collates what `part` takes of each sample.
template <class T, class Part>
auto collate_part(std::vector<T>& samples, const std::string& where, const Part& part) {
  using Value = std::remove_cvref_t<decltype(part(samples.front()))>;
  std::vector<Value> values;
  values.reserve(samples.size());
  for (T& sample : samples) values.push_back(std::move(part(sample)));
  return Collated<Value>::of(std::move(values), where);
}

template <class T>
struct Collated<std::vector<T>> {
  using Result = std::vector<CollatedType<T>>;
  static Result of(std::vector<std::vector<T>> samples, const std::string& where) {
    const size_t length = samples.front().size();
    for (size_t i = 1; i < samples.size(); ++i) {
      require_same_structure(samples[i].size() == length, i, where, "vectors of one length");
    }
    Result result;
    for (size_t place = 0; place < length; ++place) {
      std::vector<T> values;
      for (auto& sample : samples) values.push_back(std::move(sample[place]));
      result.push_back(Collated<T>::of(std::move(values), where + "[" + std::to_string(place) + "]"));
    }
    return result;
  }
};

// Maps whose keys are texts.
template <class Map, class CollatedResult>
struct CollatedMap {
  using Result = CollatedResult;
  static Result of(std::vector<Map> samples, const std::string& where) {
    for (size_t i = 1; i < samples.size(); ++i) {
      bool is_same = samples[i].size() == samples.front().size();
      for (const auto& entry : samples.front()) is_same = is_same && samples[i].contains(entry.first);
      require_same_structure(is_same, i, where, "maps with the same keys");
    }
    Result result;
    for (const auto& entry : samples.front()) {
      const std::string& key = entry.first;
      result[key] = collate_part(
          samples, std::string(where).append("[\"").append(key).append("\"]"), [&key](Map & sample) -> auto& {
            return sample.find(key)->second;
          });
    }
    return result;
  }
};
template <class T>
struct Collated<std::map<std::string, T>>
    : CollatedMap<std::map<std::string, T>, std::map<std::string, CollatedType<T>>> {};
template <class T>
struct Collated<std::unordered_map<std::string, T>>
    : CollatedMap<std::unordered_map<std::string, T>, std::unordered_map<std::string, CollatedType<T>>> {};

template <class... T>
struct Collated<std::tuple<T...>> {
  using Result = std::tuple<CollatedType<T>...>;
  static Result of(std::vector<std::tuple<T...>> samples, const std::string& where) {
    return [&]<size_t... kI>(std::index_sequence<kI...>) {
      return Result{collate_part(
          samples, where + "<" + std::to_string(kI) + ">",
          [](std::tuple<T...> & sample) -> auto& { return std::get<kI>(sample); })...};
    }
    (std::index_sequence_for<T...>());
  }
};

template <class A, class B>
struct Collated<std::pair<A, B>> {
  using Result = std::pair<CollatedType<A>, CollatedType<B>>;
  static Result of(std::vector<std::pair<A, B>> samples, const std::string& where) {
    return {collate_part(
                samples, where + ".first", [](auto& sample) -> auto& { return sample.first; }),
            collate_part(
                samples, where + ".second", [](auto& sample) -> auto& { return sample.second; })};
  }
};

template <class T, size_t kN>
struct Collated<std::array<T, kN>> {
  using Result = std::array<CollatedType<T>, kN>;
  static Result of(std::vector<std::array<T, kN>> samples, const std::string& where) {
    return [&]<size_t... kI>(std::index_sequence<kI...>) {
      return Result{collate_part(
          samples, where + "[" + std::to_string(kI) + "]",
          [](std::array<T, kN> & sample) -> auto& { return sample[kI]; })...};
    }
    (std::make_index_sequence<kN>());
  }
};

template <HasDataAndTarget T>
struct Collated<T> {
  using Result = T;
  static Result of(std::vector<T> samples, const std::string& /*where*/) {
    Result result{};
    result.data = collate_part(
        samples, "data", [](T & sample) -> auto& { return sample.data; });
    if constexpr (requires(T & sample) { sample.target; }) {
      static_assert(sizeof(T) == sizeof(std::pair<decltype(T::data), decltype(T::target)>),
                    "list further members in fields()");
      result.target = collate_part(
          samples, "target", [](T & sample) -> auto& { return sample.target; });
    } else {
      static_assert(sizeof(T) == sizeof(T::data), "list further members in fields()");
    }
    return result;
  }
};

template <HasFields T>
struct Collated<T> {
  using Result = T;
  static Result of(std::vector<T> samples, const std::string& where) {
    Result result{};
    size_t number = 0;
    const auto take = [&](auto member) {
      using Field = std::remove_cvref_t<decltype(result.*member)>;
      static_assert(std::same_as<CollatedType<Field>, Field>,
                    "a field of a batch has the type of a field of a sample; expected tensors and structures of them: "
                    "make a number a tensor, or give the loader a collate function");
      result.*member = collate_part(
          samples,
          where + " field " + std::to_string(number++), [member](T & sample) -> auto& { return sample.*member; });
    };
    std::apply([&](auto... member) { (take(member), ...); }, T::fields());
    return result;
  }
};

}  // namespace ds::data
