// What a script that ran Python's torch has recorded, beside tensors of ours.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace ds::test {

// tests/loops/NAME.json, which NAME.py writes.
inline nlohmann::json recorded(const std::string& name) {
  std::ifstream file(DS_SOURCE_DIR "/tests/loops/" + name + ".json");
  if (!file) throw std::runtime_error("tests/loops/" + name + ".json is missing: run tests/loops/" + name + ".py");
  return nlohmann::json::parse(file);
}

// Of each parameter the elements, in their order, or none.
inline void expect_as_torch(const std::vector<at::Tensor>& found, const nlohmann::json& wanted, double tolerance,
                            const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size()) << where;
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), !wanted[i].is_null()) << where << ", parameter " << i;
    if (!found[i].defined()) continue;
    const auto values = wanted[i].get<std::vector<float>>();
    const at::Tensor of_torch = torch::tensor(values).view(found[i].sizes());
    EXPECT_LE((found[i] - of_torch).abs().max().item<double>(), tolerance) << where << ", parameter " << i;
  }
}

}  // namespace ds::test
