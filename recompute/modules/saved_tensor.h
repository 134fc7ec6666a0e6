// A tensor that autograd saves while a region runs: kept, or dropped and made again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recompute/modules/operator_log.h"
#include "recompute/modules/stored_value.h"

namespace ds::recompute {

// Elements at even distances, as bytes: those of a tensor that was made again must be those that it had. None on an
// accelerator, where looking waits.
std::vector<uint8_t> samples_of(const at::Tensor& tensor);

class SavedTensor {
 public:
  // Keeps it, until decide().
  explicit SavedTensor(const at::Tensor& tensor);
  ~SavedTensor();
  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Once, after the operator that saved it: drops it where `log` can make it again without keeping more. Returns the
  // bytes that were dropped; 0: it is kept.
  int64_t decide(OperatorLog& log);

  // The tensor, without graph. Any thread. Throws UsageError as storage_of(), and where its samples differ.
  at::Tensor unpack() const;

 private:
  at::Tensor made_again() const;

  at::Tensor kept_;                     // undefined: dropped
  std::optional<Counts> counts_;        // until decide()
  int64_t version_;                     // when it was saved
  c10::VariableVersion changes_;        // of whoever shares its memory
  std::shared_ptr<StoredValue> value_;  // of the memory
  std::optional<Geometry> geometry_;    // where it was dropped
  std::string made_by_;                 // likewise: the operator's name
  std::vector<uint8_t> samples_;
};

}  // namespace ds::recompute
