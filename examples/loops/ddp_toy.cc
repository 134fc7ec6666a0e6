// PyTorch's DDP tutorial in C++: a toy model, a checkpoint that rank 0 writes and all ranks read, and a model that is
// itself on two devices.
//
//   ds-launch --num_procs 2 ddp_toy
#include <dsengine/distributed_data_parallel.h>
#include <dsengine/init_distributed.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <utility>

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl() {
    net1 = register_module("net1", torch::nn::Linear(10, 10));
    net2 = register_module("net2", torch::nn::Linear(10, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return net2(torch::relu(net1(x))); }
  torch::nn::Linear net1{nullptr}, net2{nullptr};
};
TORCH_MODULE(ToyModel);

// The function that the model learns: five sums of two neighbours each.
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

// Prints whether the ranks, which made the same steps from the same start, have the same parameters.
void tell_agreement(const char* what, const ds::engine::Distributed& job, const torch::nn::Module& model) {
  at::Tensor sum = torch::zeros({2}, torch::kDouble);
  for (const at::Tensor& parameter : model.parameters()) sum += parameter.detach().cpu().to(torch::kDouble).sum();
  sum[1] = -sum[1];
  sum = sum.to(job.device);
  job.ranks->all_reduce(sum, ds::comm::ReduceOp::kMax).wait();
  if (job.ranks->rank() != 0) return;
  std::cout << what << ": ranks " << (sum[0].item<double>() == -sum[1].item<double>() ? "agree" : "differ")
            << std::endl;
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

  tell_agreement("checkpoint", job, *model);
  if (job.ranks->rank() == 0) std::filesystem::remove(path);
}

// --- DDP combined with model parallel ---

struct ToyMpModelImpl : torch::nn::Module {
  ToyMpModelImpl(torch::Device first, torch::Device second) : dev0(first), dev1(second) {
    net1 = register_module("net1", torch::nn::Linear(10, 10));
    net2 = register_module("net2", torch::nn::Linear(10, 5));
    net1->to(dev0);
    net2->to(dev1);
  }
  at::Tensor forward(const at::Tensor& x) { return net2(torch::relu(net1(x.to(dev0))).to(dev1)); }
  torch::Device dev0, dev1;
  torch::nn::Linear net1{nullptr}, net2{nullptr};
};
TORCH_MODULE(ToyMpModel);

// Two GPUs for each rank where every host has so many; else both parts are on the rank's one device.
std::pair<torch::Device, torch::Device> devices_of(const ds::engine::Distributed& job) {
  const bool lacks = !job.device.is_cuda() || static_cast<int>(torch::cuda::device_count()) < 2 * (job.local_rank + 1);
  const at::Tensor some_lack = torch::full({1}, lacks ? 1.0 : 0.0, torch::TensorOptions(job.device));
  job.ranks->all_reduce(some_lack, ds::comm::ReduceOp::kMax).wait();
  if (some_lack.item<double>() > 0) return {job.device, job.device};
  const auto first = static_cast<torch::DeviceIndex>(2 * job.local_rank);
  return {{torch::kCUDA, first}, {torch::kCUDA, static_cast<torch::DeviceIndex>(first + 1)}};
}

void demo_model_parallel(const ds::engine::Distributed& job) {
  const auto [dev0, dev1] = devices_of(job);
  ToyMpModel mp_model(dev0, dev1);
  ds::DistributedDataParallel ddp_mp_model(mp_model, {.process_group = job.ranks});  // device_ids stay empty
  torch::optim::SGD optimizer(mp_model->parameters(), 0.001);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor inputs = torch::randn({20, 10});
    torch::mse_loss(ddp_mp_model(inputs), labels_of(inputs).to(dev1)).backward();
    optimizer.step();
  }
  tell_agreement("two parts", job, *mp_model);
}

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "ddp_toy.pt";
  const ds::engine::Distributed job = ds::engine::init_distributed();
  torch::manual_seed(job.ranks->rank());  // batches and start values of its own: the wrapper takes rank 0's
  demo_basic(job);
  demo_checkpoint(job, path);
  demo_model_parallel(job);
}
