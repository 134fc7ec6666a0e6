// Values that the ranks of a group agree on: numbers and texts that all of them know, a failure of one rank that all of
// them report, parameters and buffers that become those of one rank.
//
// Every function is collective: all ranks of the group call it in the same order, with the same label. `device` is the
// ranks' own. All of them throw CommError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// Returns `own` of rank 0, then that of rank 1, and so on; every rank gives as many numbers.
std::vector<int64_t> numbers_of_ranks(Communicator& ranks, c10::Device device, const std::vector<int64_t>& own,
                                      const std::string& label);

// Returns a number for the host of each rank, in the order of the hosts' first ranks; ranks that share memory have the
// same number.
std::vector<int> hosts_of(Communicator& ranks, c10::Device device);

// Returns the largest `value` of all ranks.
int64_t largest_of_ranks(int64_t value, c10::Device device, Communicator& ranks, const char* label);

// Returns whether all ranks have the same number. It is not the least of its type.
bool same_number_on_all_ranks(int64_t value, c10::Device device, Communicator& ranks, const char* label);

// Returns the mean of all ranks' values, the same bits on each; where all have the same value, exactly that one.
double mean_of_ranks(double value, c10::Device device, Communicator& ranks, const char* label);

// Makes what one rank does between collectives (reading or writing a file, taking memory) fail on all of them.
// `failure` is this rank's, null when all went well: it is thrown. A rank without one gets the number of a rank that
// failed, or -1.
int failed_rank(const std::exception_ptr& failure, c10::Device device, Communicator& ranks);

// Returns the message of an exception, without the stack of one of LibTorch. `failure` is not null. Not collective.
std::string message_of(const std::exception_ptr& failure);

// The failure of another rank.
struct RankFailure {
  int rank = 0;
  std::string message;
};
// Does what failed_rank() does, and gives the ranks without a failure the message of the one that failed; nothing where
// none did. Use it for failures that some ranks alone are likely to have, such as those of the start; it exchanges one
// text more.
std::optional<RankFailure> failure_of_ranks(const std::exception_ptr& failure, c10::Device device, Communicator& ranks);

// Returns the text of rank `root` on every rank.
std::string text_of_rank(const std::string& text, int root, c10::Device device, Communicator& ranks);
// Returns the text of rank 0 on every rank.
std::string text_of_first_rank(const std::string& text, c10::Device device, Communicator& ranks);
// Returns the text of each rank, in the order of the ranks, on every rank. No text has a NUL in it.
std::vector<std::string> texts_of_ranks(const std::string& text, c10::Device device, Communicator& ranks,
                                        const char* label);
// Returns whether all ranks have the same text.
bool same_text_on_all_ranks(const std::string& text, c10::Device device, Communicator& ranks);

// Overwrites the elements of `tensors` with those of rank `root`, in place; autograd graphs that have saved the tensors
// stay usable, since their versions do not change. Small tensors of one device and dtype share messages of a few MiB,
// others are sent from where they lie. Undefined and empty tensors are left out. `what` begins the labels: "buffers".
// Tensors have the same sizes and dtypes on all ranks.
void broadcast_values(const std::vector<at::Tensor>& tensors, int root, Communicator& ranks, const std::string& what);

}  // namespace ds::comm
