#include "optim/written_states.h"

#include <torch/serialize/archive.h>

#include <exception>
#include <sstream>

#include "core/text.h"

namespace ds::optimizers {
namespace {

torch::serialize::InputArchive read_back(torch::serialize::OutputArchive& archive) {
  auto stream = classic_stream<std::stringstream>();
  archive.save_to(stream);
  torch::serialize::InputArchive result;
  result.load_from(stream);
  return result;
}

}  // namespace

std::optional<WrittenState> written_state(const torch::optim::OptimizerParamState& state) {
  WrittenState result;
  try {
    torch::serialize::OutputArchive archive;
    state.serialize(archive);
    torch::serialize::InputArchive written = read_back(archive);
    for (const std::string& key : written.keys()) {
      c10::IValue value;
      if (!written.try_read(key, value)) return std::nullopt;
      if (value.isTensor()) {
        result.tensors.emplace_back(key, value.toTensor());
      } else if (value.isInt()) {
        result.numbers[key] = value.toInt();
      } else {
        return std::nullopt;
      }
    }
  } catch (const std::exception&) {  // the base class' serialize() throws: the program has written none
    return std::nullopt;
  }
  return result;
}

void read_state(torch::optim::OptimizerParamState& state, const WrittenState& values) {
  torch::serialize::OutputArchive archive;
  for (const auto& [key, tensor] : values.tensors) archive.write(key, c10::IValue(tensor));
  for (const auto& [key, number] : values.numbers) archive.write(key, c10::IValue(number));
  torch::serialize::InputArchive written = read_back(archive);
  state.serialize(written);
}

}  // namespace ds::optimizers
