// A torch::optim::Optimizer of the program as an optimizer of slices.
//
// Its groups hold the masters of this rank's slices in the place of the parameters, so that the program's object, and
// torch's schedulers that write into its groups, go on. Each slice is updated by a step() of it in which that slice
// alone has a gradient: it has to update each element by itself, and to leave alone what has none, as torch's do
// (optim/elementwise_probe finds out). Its options are in its own groups; groups() here mean nothing.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/client_states.h"
#include "optim/row_update.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

class ClientOptimizer final : public SliceOptimizer, public RowOptimizer {
 public:
  // Returns the states that the optimizer has had for a parameter until now, by name: flat tensors of the elements that
  // this rank has.
  using Previous = std::function<NamedStates(int parameter)>;

  // `states`: one for each of its groups. Slices of group `states.size()` are not its own, and stay as they are.
  ClientOptimizer(std::shared_ptr<torch::optim::Optimizer> client, std::vector<ClientState> states, Previous previous);

  // Puts the slices, all of which are added, in the places of the parameters. `steps`: how many it has made before.
  void hold(int64_t steps);

  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  void begin_step() override;
  // Steps the optimizer with a sparse gradient, which torch's SGD and Adagrad take: their options and their bits.
  void update_rows(int64_t index, const TableRows& gradients, double gradient_scale) override;
  NamedStates states(int64_t index) override;
  void states_changed(bool rank_states) override;
  OptimizerTraits traits() const override;
  std::string name() const override { return client_name(*client_); }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  const ClientState* kind_of(const Slice& slice) const;
  // The tensor that stands in a group for a slice: the master or, of a row-wise table, its rows.
  const at::Tensor& leaf(int64_t index) const { return leaves_[static_cast<size_t>(index)]; }
  // Steps the optimizer with this gradient of one slice alone, and keeps what it makes of its state.
  void step_on(int64_t index, const at::Tensor& gradient);
  // Makes its entry for a slice, with the tensors that are kept here.
  void begin_state(int64_t index);
  void take_over(int64_t index) const;
  // Tensors that a step has made are kept here, in memory that was foreseen for them.
  void adopt(int64_t index);
  // Both serve states of a class of the program's (ClientState::is_written), which have tensors of their own, of which
  // those here are copies. read_written() copies the state as it is now, where somebody has asked for it since the last
  // step; write_changed() copies back, where somebody has changed it.
  void read_written(int64_t index);
  void write_changed(int64_t index, int64_t steps);
  uint64_t versions_of(int64_t index) const;

  std::shared_ptr<torch::optim::Optimizer> client_;
  std::vector<ClientState> kinds_;  // by group
  Previous previous_;
  std::vector<at::Tensor> leaves_;   // by slice
  std::vector<NamedStates> states_;  // by slice
  struct Copy {
    bool is_current = false;
    bool is_asked = false;  // for, since the last step: they are kept current over one more
    uint64_t versions = 0;  // of the copies, when they were made
  };
  std::vector<Copy> copies_;  // by slice
};

}  // namespace ds::optimizers
