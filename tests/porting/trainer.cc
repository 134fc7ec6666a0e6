#include "tests/porting/trainer.h"

#include <utility>

#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

// One for the process: ranks that are threads share it.
const test::ScratchFolder& shared_folder() {
  static const test::ScratchFolder folder;
  return folder;
}

class PlainModel : public TrainedModel {
 public:
  PlainModel(std::shared_ptr<torch::nn::Module> model, Recipe recipe)
      : model_(std::move(model)), recipe_(std::move(recipe)), optimizer_(recipe_.optimizer) {
    if (optimizer_) return;
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : model_->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    if (trained.empty()) return;
    optimizer_ =
        std::make_shared<torch::optim::AdamW>(trained, torch::optim::AdamWOptions(recipe_.lr).weight_decay(0.01));
    set_rate();
  }
  void backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) override {
    (scale_wrt_gas ? loss / recipe_.accumulation : loss).backward({}, retain_graph);
  }
  void step() override {
    if (++micro_steps_ % recipe_.accumulation != 0) return;
    for (at::Tensor& parameter : model_->parameters()) {  // as the engine, whose missing gradients are zeros
      if (parameter.requires_grad() && !parameter.grad().defined()) {
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
    }
    if (recipe_.clip_norm > 0) torch::nn::utils::clip_grad_norm_(model_->parameters(), recipe_.clip_norm);
    optimizer_->step();
    optimizer_->zero_grad();
    ++updates_;
    set_rate();
  }
  void with_whole_weights(const std::function<void()>& body) override { body(); }
  std::string save(const std::string& file, bool exclude_frozen) override {
    StateDict tensors;
    for (const auto& item : model_->named_parameters()) {
      if (item.value().requires_grad() || !exclude_frozen) tensors.emplace_back(item.key(), item.value().detach());
    }
    for (const auto& item : model_->named_buffers()) tensors.emplace_back(item.key(), item.value());
    const std::string path = shared_folder() / file;
    checkpoint::write_weights(path, tensors);
    return path;
  }

 private:
  void set_rate() {
    if (!recipe_.lr_factor || recipe_.optimizer) return;
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(recipe_.lr * recipe_.lr_factor(updates_));
  }

  std::shared_ptr<torch::nn::Module> model_;
  Recipe recipe_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  int64_t micro_steps_ = 0;
  int64_t updates_ = 0;
};

class EngineModel : public TrainedModel {
 public:
  explicit EngineModel(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  void backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) override {
    engine_->backward(loss, retain_graph, scale_wrt_gas);
  }
  void step() override { engine_->step(); }
  void with_whole_weights(const std::function<void()>& body) override {
    const auto whole = engine_->gathered_parameters(engine_->module()->parameters());
    body();
  }
  std::string save(const std::string& file, bool exclude_frozen) override {
    return engine_->save_16bit_model(shared_folder().path().string(), file, exclude_frozen);
  }
  std::shared_ptr<Engine> engine() const override { return engine_; }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace

Config Trainer::config(const Recipe& recipe) const {
  Config config = adamw_config(zero_, recipe.accumulation);
  config["optimizer"]["params"]["lr"] = recipe.lr;
  config["gradient_clipping"] = recipe.clip_norm;
  if (recipe.optimizer) config.erase("optimizer");
  config.update(recipe.keys);
  return config;
}

std::shared_ptr<TrainedModel> Trainer::train(const std::shared_ptr<torch::nn::Module>& model,
                                             const Recipe& recipe) const {
  if (finds_config_) throw FoundConfig(config(recipe));
  if (ranks_ == nullptr) return std::make_shared<PlainModel>(model, recipe);
  InitializeOptions options{
      .model = model, .config = config(recipe), .optimizer = recipe.optimizer, .communicator = test::borrowed(*ranks_)};
  if (!recipe.keys.contains("scheduler")) options.lr_scheduler = recipe.lr_factor;
  return std::make_shared<EngineModel>(initialize(options).engine);
}

std::shared_ptr<TrainedModel> Trainer::evaluate(const std::shared_ptr<torch::nn::Module>& model) const {
  model->eval();
  if (ranks_ == nullptr) return std::make_shared<PlainModel>(model, Recipe());
  Config config = this->config({});
  config.erase("optimizer");
  return std::make_shared<EngineModel>(start(model, config, *ranks_).engine);
}

void Trainer::backward(const at::Tensor& loss, const std::vector<std::shared_ptr<TrainedModel>>& models) const {
  if (ranks_ == nullptr) return loss.backward();
  std::vector<std::shared_ptr<Engine>> engines;
  for (const auto& model : models) engines.push_back(model->engine());
  engine::backward(loss, engines);
}

at::Tensor Trainer::sum(const at::Tensor& value) const {
  at::Tensor result = value.detach().clone();
  if (ranks_ != nullptr) ranks_->all_reduce(result, comm::ReduceOp::kSum, "sum of the program").wait();
  return result;
}

double sum_of_weights(const torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (const at::Tensor& parameter : model.parameters()) sum += parameter.to(torch::kDouble).abs().sum().item<double>();
  return sum;
}

}  // namespace ds::engine
