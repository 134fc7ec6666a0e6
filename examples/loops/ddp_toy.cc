// PyTorch's DDP tutorial in C++: a toy model, and a checkpoint that rank 0 writes and all ranks read.
//
//   ds-launch --num_procs 2 ddp_toy
#include <dsengine/distributed_data_parallel.h>
#include <dsengine/init_distributed.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <string>

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl() {
    net1 = register_module("net1", torch::nn::Linear(10, 10));
    net2 = register_module("net2", torch::nn::Linear(10, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return net2(torch::relu(net1(x))); }
  torch::nn::Linear net1{nullptr}, net2{nullptr};
};
TORCH_MODULE(ToyModel);

// What the model learns: five sums of two neighbours each.
at::Tensor labels_of(const at::Tensor& inputs) { return inputs.view({-1, 5, 2}).sum(2); }

void demo_basic(const ds::engine::Distributed& job) {
  ToyModel model;
  ds::DistributedDataParallel ddp_model(model, {.process_group = job.ranks});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 1; step <= 200; ++step) {
    optimizer.zero_grad();
    const at::Tensor inputs = torch::randn({20, 10});
    const at::Tensor loss = torch::mse_loss(ddp_model(inputs), labels_of(inputs));
    loss.backward();
    optimizer.step();
    if (step % 100 == 0 && job.ranks->rank() == 0) {
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
    }
  }
}

void demo_checkpoint(const ds::engine::Distributed& job, const std::string& path) {
  ToyModel model;
  ds::DistributedDataParallel ddp_model(model, {.process_group = job.ranks});
  torch::optim::SGD optimizer(model->parameters(), 0.001);
  // All ranks have the same parameters, so that one of them saves, and the others wait until it has.
  if (job.ranks->rank() == 0) torch::save(ddp_model.module, path);
  job.ranks->barrier();
  torch::load(ddp_model.module, path);

  optimizer.zero_grad();
  const at::Tensor inputs = torch::randn({20, 10});
  torch::mse_loss(ddp_model(inputs), labels_of(inputs)).backward();
  optimizer.step();

  // The same step everywhere, from the same start.
  at::Tensor sum = torch::zeros({2}, torch::kDouble);
  for (const at::Tensor& parameter : model->parameters()) sum += parameter.detach().to(torch::kDouble).sum();
  sum[1] = -sum[1];
  job.ranks->all_reduce(sum, ds::comm::ReduceOp::kMax).wait();
  if (job.ranks->rank() == 0) {
    std::cout << "checkpoint: ranks " << (sum[0].item<double>() == -sum[1].item<double>() ? "agree" : "differ")
              << std::endl;
    std::filesystem::remove(path);
  }
}

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "ddp_toy.pt";
  const ds::engine::Distributed job = ds::engine::init_distributed();
  torch::manual_seed(job.ranks->rank());  // batches and start values of its own: the wrapper takes rank 0's
  demo_basic(job);
  demo_checkpoint(job, path);
}
