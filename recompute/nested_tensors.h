// Visits the tensors inside a value: a tensor, a vector, optional, pair or tuple of such values, nested in any way.
// What is none of these has no tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ds::recompute {

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::bool_constant<!std::is_same_v<T, bool>> {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

// Calls visit(at::Tensor&) for each tensor, in order, also for undefined ones.
template <class T, class Visit>
void visit_tensors(T& value, Visit&& visit) {
  if constexpr (std::is_base_of_v<at::Tensor, T>) {
    visit(static_cast<at::Tensor&>(value));
  } else if constexpr (IsVector<T>::value) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (IsOptional<T>::value) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (IsTuple<T>::value) {
    std::apply([&](auto&... parts) { (visit_tensors(parts, visit), ...); }, value);
  }
}

// Moves the tensors out: undefined ones stay in their places.
template <class T>
std::vector<at::Tensor> take_tensors(T& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
  return tensors;
}

// The reverse, for a value of the same structure.
template <class T>
void put_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  visit_tensors(value, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

}  // namespace ds::recompute
