// The shape of Lightning's first example: an autoencoder that says what a training step is and which optimizer it
// wants, and a Trainer with strategy="ddp" that has the loop.
//
//   ds-launch --num_procs 2 lit_autoencoder
//
// The digits are drawn, so that it runs anywhere. In Lightning the trainer starts the ranks; here ds-launch does.
#include <dsengine/distributed_data_parallel.h>
#include <dsengine/init_distributed.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

namespace {

constexpr int64_t kPixels = 8;  // in a row

// Rectangles in pictures of 8 x 8: four numbers say all of one.
class Rectangles : public torch::data::datasets::Dataset<Rectangles> {
 public:
  torch::data::Example<> get(size_t index) override {
    const auto at = [&](size_t digit) { return static_cast<int64_t>((index * 2654435761U >> (3 * digit)) % 4); };
    auto picture = torch::zeros({kPixels, kPixels});
    picture.narrow(0, at(1), at(2) + 1).narrow(1, at(3), at(4) + 1).fill_(1);
    return {picture.view({-1}), torch::empty({0})};
  }
  torch::optional<size_t> size() const override { return 1024; }
};

struct LitAutoEncoderImpl : torch::nn::Module {
  LitAutoEncoderImpl() {
    namespace nn = torch::nn;
    encoder = register_module("encoder", nn::Sequential(nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 8)));
    decoder = register_module("decoder", nn::Sequential(nn::Linear(8, 64), nn::ReLU(), nn::Linear(64, 64)));
  }
  // The function that DistributedDataParallel calls, as Lightning's strategy does with training_step.
  at::Tensor forward(const torch::data::Example<>& batch) { return training_step(batch); }
  at::Tensor training_step(const torch::data::Example<>& batch) {
    return torch::mse_loss(decoder->forward(encoder->forward(batch.data)), batch.data);
  }
  std::unique_ptr<torch::optim::Optimizer> configure_optimizers() const {
    return std::make_unique<torch::optim::Adam>(parameters(), torch::optim::AdamOptions(3e-3));
  }
  torch::nn::Sequential encoder{nullptr}, decoder{nullptr};
};
TORCH_MODULE(LitAutoEncoder);

struct TrainerOptions {
  int max_epochs = 1;
  int log_every_n_steps = 50;
  size_t batch_size = 16;  // of one rank
};

// Trainer(strategy="ddp"): whatever has training_step() and configure_optimizers().
class Trainer {
 public:
  explicit Trainer(const TrainerOptions& options) : options_(options) {}

  template <class Model, class Data>
  void fit(Model& model, Data data) {
    const auto job = ds::engine::init_distributed();
    model->to(job.device);
    ds::DistributedDataParallel<Model> replica(model, {.process_group = job.ranks});
    const auto optimizer = model->configure_optimizers();
    auto batches = std::move(data).map(torch::data::transforms::Stack<>());
    torch::data::samplers::DistributedRandomSampler sampler(*batches.size(), static_cast<size_t>(job.ranks->size()),
                                                            static_cast<size_t>(job.ranks->rank()));
    int step = 0;
    for (int epoch = 0; epoch < options_.max_epochs; ++epoch) {
      sampler.set_epoch(static_cast<size_t>(epoch));
      auto loader = torch::data::make_data_loader(batches, sampler, options_.batch_size);
      for (auto& batch : *loader) {
        optimizer->zero_grad();
        at::Tensor loss = replica(torch::data::Example<>{batch.data.to(job.device), batch.target});
        loss.backward();
        optimizer->step();
        if (++step % options_.log_every_n_steps == 0) log(*job.ranks, step, loss.detach());
      }
    }
  }

 private:
  // self.log("train_loss", loss, sync_dist=True)
  static void log(ds::comm::Communicator& ranks, int step, const at::Tensor& loss) {
    const at::Tensor mean = loss.view({1}).clone();
    ranks.all_reduce(mean, ds::comm::ReduceOp::kAvg).wait();
    if (ranks.rank() == 0) std::cout << "step " << step << "  loss " << mean.item<float>() << std::endl;
  }

  TrainerOptions options_;
};

}  // namespace

int main() {
  try {
    LitAutoEncoder autoencoder;
    Trainer trainer({.max_epochs = 7});
    trainer.fit(autoencoder, Rectangles());
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "lit_autoencoder: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
