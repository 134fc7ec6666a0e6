// A rank's model whose layers are split over one axis of a mesh and sharded along the others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dsengine/device_mesh.h"
#include "dsengine/fully_shard.h"
#include "dsengine/parallel.h"
#include "tests/loops/block_net.h"

namespace ds::split_shards {

inline constexpr int kDataRanks = 2;
inline constexpr int kWorld = 4;
inline constexpr int kSteps = 12;
inline constexpr double kTolerance = 5e-6;
inline constexpr double kMaxNorm = 0.3;  // which some steps are above

// Two blocks of unequal size are fused in `up`: parts are of 7 and 6 rows, and of a weight's columns none lie together.
inline std::vector<parallel::SplitRule> rules() {
  using enum parallel::Style;
  return {{".*up", kColumn, {6, 7}}, {".*down", kRow, {6, 7}}};
}

struct Setup {
  FullyShardOptions options = {};
  bool sequences = false;
  bool freezes = false;
  std::vector<int> shape = {kDataRanks, 2};
};

inline void freeze_some(test::BlockNet& model) {
  model->blocks[0]->down->weight.set_requires_grad(false);
  model->blocks[1]->norm->bias.set_requires_grad(false);
}

// One rank's model. The axis is that of the mesh's last one.
struct Trainee {
  explicit Trainee(comm::Communicator& world, Setup setup = {})
      : mesh(comm::init_device_mesh(test::borrowed(world), setup.shape,
                                    setup.shape.size() == 2 ? std::vector<std::string>{"dp", "tp"}
                                                            : std::vector<std::string>{"replicate", "shard", "tp"})),
        data(setup.shape.size() == 2 ? mesh["dp"] : mesh[{"replicate", "shard"}]) {
    if (setup.freezes) freeze_some(model);
    split = parallel::parallelize_module(*model, mesh["tp"], rules(), {.sequence_parallel = setup.sequences});
    setup.options.mesh = data;
    for (test::Block& block : model->blocks) fully_shard(block, setup.options);
    sharded = fully_shard(model, setup.options);
  }

  // The mean of all batches of a step; gradients are there.
  double backward(int64_t step) {
    const at::Tensor loss = parallel::whole(model->loss(test::batch_of(step, data.get_local_rank())));
    loss.backward();
    const at::Tensor mean = loss.detach().to(at::kDouble).view({1}) / data.size();
    data.get_group()->all_reduce(mean).wait();
    return mean.item<double>();
  }
  void train(torch::optim::Optimizer& optimizer, int from, int steps) {
    for (int step = from; step < from + steps; ++step) {
      backward(step);
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  comm::NamedMesh mesh, data;
  test::BlockNet model;
  parallel::SplitModule split;
  std::shared_ptr<FullySharded> sharded;
};

}  // namespace ds::split_shards
