// A model of tests/exported/data with what eager Python computes with it, and the batches that both train on.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/exported_model.h"

namespace ds::test {

inline const std::string kExportedData = std::string(DS_SOURCE_DIR) + "/tests/exported/data/";

// NAME.json as tests/exported/export_models.py writes it, and the formulas of models.py. `folder`: of the file of
// another version of torch, "torch2.9/", which has the same weights.
class GoldenModel {
 public:
  explicit GoldenModel(const std::string& name, const std::string& folder = {})
      : path_(kExportedData + folder + name + ".pt2") {
    std::ifstream file(kExportedData + name + ".json");
    golden_ = nlohmann::json::parse(file);
  }

  const std::string& path() const { return path_; }
  std::vector<double> losses() const { return golden_.at("losses"); }
  std::vector<double> eval() const { return golden_.at("eval"); }
  std::vector<double> eval_after() const { return golden_.at("eval_after"); }
  // The norm of each tensor of Python's state dict after training, and of the gradients of the first step.
  std::map<std::string, double> norms() const { return golden_.at("norms"); }
  std::map<std::string, double> first_gradients() const { return golden_.at("first_gradients"); }

  // The section "optimizer" that trains as Python did.
  nlohmann::ordered_json optimizer() const {
    nlohmann::ordered_json params = {{"lr", golden_.at("rate")}};
    if (golden_.at("optimizer") == "AdamW") params["weight_decay"] = 0.01;
    return {{"type", golden_.at("optimizer")}, {"params", params}};
  }

  // The inputs of a step for one of `ranks` equal parts of its batch.
  ExportedInputs inputs(int64_t step, int rank = 0, int ranks = 1) const {
    ExportedInputs result;
    int64_t which = 0;
    for (const nlohmann::json& input : golden_.at("inputs")) {
      std::vector<int64_t> sizes = input.at("sizes");
      const bool shared = input.at("shared");
      const bool labels = input.at("name") == "labels";
      if (!shared) sizes.insert(sizes.begin(), kBatch);
      const at::Tensor whole = numbers(sizes, shared ? 0 : step, labels ? 0 : which, input.at("below"));
      result.emplace_back(input.at("name").get<std::string>(), shared ? whole : part(whole, rank, ranks));
      ++which;
    }
    return result;
  }

  // The loss of a rank's part of a step's batch.
  at::Tensor loss(ExportedModule& model, int64_t step, int rank = 0, int ranks = 1) const {
    ExportedInputs given = inputs(step, rank, ranks);
    const std::string kind = golden_.at("loss");
    if (kind == "output") return model.forward(given)["loss"];
    if (kind == "heat") return heat_loss(model, given.at(0).second.toTensor());
    const at::Tensor output = first(model.forward(given));
    if (kind == "next_token") {
      const at::Tensor next = given.at(0).second.toTensor().roll(-1, 1);
      return at::cross_entropy_loss(output.reshape({-1, output.size(-1)}), next.reshape({-1}));
    }
    return loss_of(output, target(step, rank, ranks));
  }

  // The target of a rank's part of a step's batch, and the loss of an output that has one.
  at::Tensor target(int64_t step, int rank = 0, int ranks = 1) const {
    if (golden_.at("loss") == "cross_entropy") {
      return part(numbers({kBatch}, step, 5, golden_.at("target")), rank, ranks);
    }
    std::vector<int64_t> sizes = golden_.at("target");
    sizes.insert(sizes.begin(), kBatch);
    return part(numbers(sizes, step, 5, 0), rank, ranks);
  }
  at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) const {
    if (golden_.at("loss") == "cross_entropy") return at::cross_entropy_loss(output, target);
    return at::mse_loss(output, target.to(output.scalar_type()));
  }

  // The first values of the output in eval(), as many as Python wrote.
  std::vector<double> evaluate(ExportedModule& model) const {
    const torch::NoGradGuard no_grad;
    model.eval();
    const at::Tensor output = first(model.forward(inputs(0))).flatten().to(at::kDouble).contiguous();
    model.train();
    const auto count = std::min<int64_t>(output.numel(), static_cast<int64_t>(eval().size()));
    return {output.const_data_ptr<double>(), output.const_data_ptr<double>() + count};
  }

 private:
  static constexpr int64_t kBatch = 8;

  static at::Tensor numbers(const std::vector<int64_t>& sizes, int64_t step, int64_t which, int64_t below) {
    const at::Tensor i = torch::arange(c10::multiply_integers(sizes), torch::kLong);
    const at::Tensor u = (i * i * 7 + i * (37 + 10 * which) + (101 * step + 17 * which)) % 251;
    return (below > 0 ? u % below : (u - 125).to(torch::kFloat) / 128).reshape(sizes);
  }
  static at::Tensor part(const at::Tensor& whole, int rank, int ranks) { return whole.chunk(ranks)[rank].clone(); }
  static at::Tensor first(const ExportedOutputs& outputs) {
    for (const std::string& name : outputs.names()) {
      if (name == "value" || name == "logits") return outputs[name];
    }
    return outputs.tensor();
  }
  static at::Tensor heat_loss(ExportedModule& model, at::Tensor points) {
    points.requires_grad_();
    const at::Tensor u = model.forward(points);
    const auto slope = [&points](const at::Tensor& of) {
      return torch::autograd::grad({of.sum()}, {points}, {}, std::nullopt, /*create_graph=*/true)[0];
    };
    const at::Tensor slopes = slope(u);
    const at::Tensor bends = slope(slopes.select(1, 0));
    return (slopes.select(1, 1) - bends.select(1, 0) * 0.1).square().mean() + u.square().mean();
  }

  std::string path_;
  nlohmann::json golden_;
};

}  // namespace ds::test
