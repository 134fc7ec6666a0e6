// The errors of gathers. An operator that waits for one cannot throw them.
#pragma once

#include <exception>
#include <string>

namespace ds::zero {

// Keeps the errors of gathers for the engine's next call, because LibTorch only logs what callbacks on operators throw.
// Not thread safe.
class GatherErrors {
 public:
  // Keeps an error for rethrow(), unless there is one already. Null: does nothing.
  void keep(const std::exception_ptr& error) {
    if (!failure_) failure_ = error;
  }
  // Notes that this rank had no memory for a bucket, and can begin no gather any more: rethrow() throws it in every
  // call.
  void keep_no_memory(const std::string& text);
  bool out_of_memory() const { return no_memory_ != nullptr; }
  bool failed() const { return failure_ != nullptr || out_of_memory(); }
  // Throws the error that was kept, once; the error that there was no memory, in every call.
  void rethrow();

 private:
  std::exception_ptr failure_;
  std::exception_ptr no_memory_;
};

// Returns `error` with advice added, where it says that ranks issued different collectives; any other error as it is.
std::exception_ptr add_advice(const std::exception_ptr& error);
// The text of any error of a gather that an operator waited for, with the same advice.
std::string text_with_advice(const std::exception_ptr& error);

}  // namespace ds::zero
