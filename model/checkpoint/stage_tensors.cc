#include "model/checkpoint/stage_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/module_file.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/json/parse_json.h"
#include "core/tensor_check.h"
#include "core/text_lines.h"

namespace ds::engine {
namespace {

// Stands in the place of a tensor's number where a rank has failed.
constexpr int64_t kGivenUp = -1;

std::string text_of(const std::vector<StageTensor>& tensors) {
  nlohmann::json list = nlohmann::json::array();
  for (const StageTensor& one : tensors) {
    list.push_back({one.name, static_cast<int>(one.dtype), one.sizes, one.is_buffer});
  }
  return list.dump();
}

std::vector<StageTensor> tensors_of(const std::string& text) {
  std::vector<StageTensor> tensors;
  for (const nlohmann::json& one : parse_json<nlohmann::json>(text)) {
    tensors.push_back({.name = one[0].get<std::string>(),
                       .dtype = static_cast<at::ScalarType>(one[1].get<int>()),
                       .sizes = one[2].get<std::vector<int64_t>>(),
                       .is_buffer = one[3].get<bool>()});
  }
  return tensors;
}

void send_number(const ModelState& state, int64_t number) {
  const at::Tensor message = at::full({1}, number, at::TensorOptions(at::kLong).device(state.ranks.device));
  state.pipeline->ranks->isend(message, 0, 0, "a tensor's number for a file").wait();
}

}  // namespace

StageTensors::StageTensors(const ModelState& state, const std::vector<StageTensor>& own) : state_(state) {
  std::vector<StageTensor> given;
  std::copy_if(own.begin(), own.end(), std::back_inserter(given),
               [&](const StageTensor& one) { return !state.is_copy(one.name); });
  for (const std::string& text : comm::texts_of_ranks(text_of(given), state.ranks.device, *state.pipeline->ranks,
                                                      "tensors of the stages for a file")) {
    first_of_.push_back(all_.size());
    for (StageTensor& one : tensors_of(text)) {
      place_.emplace(one.name, all_.size());
      all_.push_back(std::move(one));
    }
  }
  first_of_.push_back(all_.size());
  unsent_ = is_first() ? 0 : given.size();
}

// Sends bytes, since the tensor may be of any dtype. What may fail on this rank alone comes before the number: behind
// it the first rank waits for the bytes.
void StageTensors::send(const std::string& name, const at::Tensor& values) {
  if (state_.is_copy(name)) return;
  const size_t place = place_.at(name);
  const StageTensor& announced = all_[place];
  require(values.scalar_type() == announced.dtype && values.sizes() == c10::IntArrayRef(announced.sizes), name,
          ": expected a tensor of shape ", c10::IntArrayRef(announced.sizes), " and type ", announced.dtype, ", found ",
          describe(values));
  const at::Tensor flat = values.detach().to(state_.ranks.device).contiguous().view({-1});
  send_number(state_, static_cast<int64_t>(place));
  if (flat.numel() > 0) state_.pipeline->ranks->isend(flat.view(at::kByte), 0, 0, name).wait();
  --unsent_;
}

void StageTensors::give_up() {
  if (std::exchange(unsent_, 0) > 0) send_number(state_, kGivenUp);
}

void StageTensors::receive(const std::function<void(const StageTensor&, const at::Tensor&)>& take) const {
  comm::Communicator& ranks = *state_.pipeline->ranks;
  const auto options = at::TensorOptions().device(state_.ranks.device);
  const at::Tensor number = at::empty({1}, options.dtype(at::kLong));
  int failed = -1;
  std::exception_ptr failure;  // of `take`
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto index = static_cast<size_t>(rank);
    for (size_t left = first_of_[index + 1] - first_of_[index]; left > 0; --left) {
      ranks.irecv(number, rank, 0, "a tensor's number for a file").wait();
      const auto place = number.item<int64_t>();
      if (place == kGivenUp) {
        failed = rank;
        break;
      }
      const StageTensor& tensor = all_.at(static_cast<size_t>(place));
      const at::Tensor values = at::empty(tensor.sizes, options.dtype(tensor.dtype));
      if (values.numel() > 0) ranks.irecv(values.view({-1}).view(at::kByte), rank, 0, tensor.name).wait();
      if (failure) continue;
      try {
        take(tensor, values);
      } catch (...) {
        failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
  require<IoError>(failed < 0, "rank ", failed, " of the pipeline could not give its tensors, its message says why");
}

std::vector<std::string> modules_without_tensors(const ModelState& state) {
  std::vector<std::string> own = checkpoint::modules_without_tensors(*state.module);
  if (state.pipeline_ranks() == 1) return own;
  std::string text;
  for (const std::string& name : own) text += name + '\n';
  std::set<std::string> all;
  for (const std::string& of_stage : comm::texts_of_ranks(text, state.ranks.device, *state.pipeline->ranks,
                                                          "modules without tensors of the stages")) {
    for (std::string& name : text_lines(of_stage)) all.insert(std::move(name));
  }
  return {all.begin(), all.end()};
}

}  // namespace ds::engine
