// The values that a storage holds between two writes, and how it is made again where it was dropped.
//
// Activations of chosen modules (dsengine/module_checkpointing.h) are known by their storages, not by tensors: a view
// is a geometry on the storage of its base, so operators that make views need no record. A value is *held* (somebody
// keeps the memory) or *made* by a step: one recorded operator with its arguments, which are values again. Values and
// steps form a graph without circles, which lives as long as saved tensors need it.
//
// Threads: the values of one region share a mutex; the graph is made by the thread of forward and read by the threads
// of autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recompute/execution_state.h"

namespace ds::recompute {

// Above autocast, split tensors and autograd; libtorch registers no kernel under it.
inline constexpr c10::DispatchKey kWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// How a tensor lies on its storage.
struct Geometry {
  at::DimVector sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  c10::DispatchKeySet keys;

  explicit Geometry(const at::Tensor& tensor);
  // Without graph. The storage is not asked for its memory.
  at::Tensor on(c10::Storage storage) const;
  int64_t elements() const;
};

// Whether a tensor is elements in a storage and nothing else: no split, nested, sparse, quantized, conjugate or
// meta tensor.
bool is_plain(const at::Tensor& tensor);

struct Step;

struct StoredValue {
  explicit StoredValue(std::shared_ptr<std::mutex> of_region) : mutex(std::move(of_region)) {}
  ~StoredValue();
  StoredValue(const StoredValue&) = delete;
  StoredValue& operator=(const StoredValue&) = delete;

  const std::shared_ptr<std::mutex> mutex;
  int64_t bytes = 0;
  at::Device device = at::kCPU;
  // Held: a tensor without graph on the memory, and its count of changes then. Undefined: `step` makes it.
  at::Tensor held;
  int64_t version = 0;
  std::shared_ptr<Step> step;
  size_t output = 0;         // of the step
  bool blank = false;        // memory that nobody has written; no step
  bool is_argument = false;  // of a step
  // Memory that is there whatever is dropped: parameters, and what saved tensors hold or need.
  bool anchored = false;
  // Dropped saved tensors that live. Once it was made for one of them it stays for the others, each of which takes it
  // once.
  int64_t savers = 0;
  int64_t awaited = 0;
  c10::Storage made;
};

struct TensorRef {
  std::shared_ptr<StoredValue> value;
  Geometry geometry;
};

struct Argument {
  enum class Kind : uint8_t { kPlain, kTensor, kTensors, kOptionalTensors };
  Kind kind = Kind::kPlain;
  c10::IValue plain;
  std::vector<std::optional<TensorRef>> tensors;
};

// A recorded operator, of those that autograd knows: below autocast, not composed of others.
struct Step {
  Step(c10::OperatorHandle of, uint64_t place) : op(std::move(of)), order(place) {}
  c10::OperatorHandle op;
  uint64_t order;  // of the operators of a region
  std::vector<Argument> arguments;
  std::optional<size_t> written;        // the argument that it changes in place: the value that it makes
  std::optional<ExecutionState> state;  // of the generators, where it draws
  int64_t state_bytes = 0;
  std::vector<int64_t> output_bytes;  // of each output's storage
};

// The storage with the value: as it is held, or made again. The caller has locked `value->mutex`. Throws UsageError
// where memory that is needed was changed in place since.
c10::Storage storage_of(const std::shared_ptr<StoredValue>& value);

// New memory with the same bytes.
c10::Storage copy_of_storage(const c10::Storage& storage);

}  // namespace ds::recompute
