// super_offload: whatever a program calls between backward and step, the result is that without it.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "dsengine/engine.h"
#include "optim/shard_optimizer.h"
#include "tests/model/offloaded/super_offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

class SuperOffloadCalls : public ::testing::TestWithParam<int> {
 protected:
  // Returns the sum of what happened, with one and two ranks, in and without an accumulation.
  Engine::Speculation expect_same(int accumulation, const Calls& calls) const {
    Engine::Speculation last;
    for (const int world : {1, 2}) {
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        const auto found = expect_same_training(offloading_config(GetParam(), accumulation), communicator, calls);
        if (communicator.rank() == 0) last = found;
      });
    }
    return last;
  }
};

INSTANTIATE_TEST_SUITE_P(Stages, SuperOffloadCalls, ::testing::Values(1, 2, 3));

TEST_P(SuperOffloadCalls, DroppedGradients) {
  const auto speculation = expect_same(2, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      script.backward();
      script.engine.step();
      script.backward(7.0);
      if (step % 2 == 0) {  // the accumulation starts anew
        script.engine.zero_grad();
        script.backward(3.0);
        script.engine.step();
        script.backward(2.0);
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 4);
}

TEST_P(SuperOffloadCalls, SeveralBackwardsAddUp) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 6; ++step) {
      script.backward();
      if (step % 2 == 0) {
        script.engine.backward(script.model->first(sample(step, script.engine.global_rank())).pow(2).mean());
      }
      if (step == 4) {
        const auto guard = script.engine.no_sync();
        script.backward(2.0);
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 5);  // of the last backward, where that is reduced
  EXPECT_EQ(speculation.rolled_back, 1);
}

TEST_P(SuperOffloadCalls, WithoutSynchronization) {
  const auto speculation = expect_same(2, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      {
        const auto guard = script.engine.no_sync();
        script.backward();
        script.engine.backward(script.model->loss(sample(step, script.engine.global_rank())));
      }
      script.backward();
      script.engine.set_gradient_accumulation_boundary(true);
      script.engine.step();
      script.engine.set_gradient_accumulation_boundary(std::nullopt);
    }
  });
  EXPECT_EQ(speculation.stood, 0);  // the boundary was declared late
  EXPECT_EQ(speculation.without, 4);
}

TEST_P(SuperOffloadCalls, ADeclaredBoundary) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 3; ++step) {
      script.engine.set_gradient_accumulation_boundary(false);
      script.backward();
      script.engine.step();
      script.engine.set_gradient_accumulation_boundary(true);
      script.backward();
      if (step == 1) {  // taken back: the accumulation goes on
        script.engine.set_gradient_accumulation_boundary(false);
        script.engine.step();
        script.engine.set_gradient_accumulation_boundary(true);
        script.backward();
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 3);
}

struct Bursting : torch::autograd::Function<Bursting> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list /*gradients*/) {
    throw std::runtime_error("the gradient burst");
  }
};

// The last layer's buckets are updated when the first layer's gradient throws.
TEST_P(SuperOffloadCalls, ABackwardThatThrows) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) {
        const at::Tensor x = sample(step, script.engine.global_rank());
        const at::Tensor hidden = Bursting::apply(script.model->first(x));
        const at::Tensor out = script.model->last(torch::tanh(script.model->norm(hidden)));
        EXPECT_THROW(script.engine.backward(out.pow(2).mean()), std::exception);
        script.engine.zero_grad();
      }
      script.backward();
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 4);
}

TEST_P(SuperOffloadCalls, ReadsSeeTheStateBeforeTheStep) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 6; ++step) {
      const State before = copy_of(script.engine.fp32_state_dict());
      const State module = copy_of(script.engine.module_state_dict());
      const State states = optimizer_states(*script.engine.optimizer());
      const int64_t count = script.engine.optimizer()->step_count();
      script.backward();
      if (step == 1) script.engine.synchronize_parameters();
      if (step == 3) expect_same_bits(copy_of(script.engine.fp32_state_dict()), before, "masters");
      if (step == 5) expect_same_bits(copy_of(script.engine.module_state_dict()), module, "module");
      if (step % 2 == 1) {
        EXPECT_EQ(script.engine.optimizer()->step_count(), count);
        expect_same_bits(optimizer_states(*script.engine.optimizer()), states, "states");
      }
      script.engine.step();
      EXPECT_EQ(script.engine.optimizer()->step_count(), count + 1);
    }
  });
  EXPECT_EQ(speculation.stood, 3);
  EXPECT_EQ(speculation.rolled_back, 3);
}

TEST_P(SuperOffloadCalls, ChangesByTheProgram) {
  const auto speculation = expect_same(1, [](Script& script) {
    const auto halve = [&] {
      const torch::NoGradGuard no_grad;
      if (script.engine.global_rank() == 0) script.model->last->weight.mul_(0.5);
    };
    script.step();
    script.backward();
    {
      const auto whole = script.engine.gathered_parameters({script.model->last->weight}, 0);
      halve();
    }
    script.engine.step();
    {
      const auto whole = script.engine.gathered_parameters({script.model->last->weight}, 0);
      script.backward();
      halve();
    }
    script.engine.step();
    script.backward();
    script.engine.optimizer()->groups()[0].lr *= 0.5;  // of the step that follows
    script.engine.step();
    script.step();
  });
  EXPECT_EQ(speculation.stood, 2);
  EXPECT_EQ(speculation.rolled_back, 2);
  EXPECT_EQ(speculation.without, 1);
}

TEST_P(SuperOffloadCalls, UnusedParametersThatAreAnError) {
  for (const int world : {1, 2}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      ordered_json config = offloading_config(GetParam(), 1);
      config["zero_optimization"]["ignore_unused_parameters"] = false;
      expect_same_training(config, communicator, [](Script& script) {
        script.step();
        script.engine.backward(script.model->first(sample(1, script.engine.global_rank())).pow(2).mean());
        EXPECT_THROW(script.engine.step(), UsageError);
        script.step();
      });
    });
  }
}

TEST_P(SuperOffloadCalls, AStepThatThrows) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    expect_same_training(offloading_config(GetParam(), 1), communicator, [](Script& script) {
      script.step();
      for (int failure = 0; failure < 3; ++failure) expect_failing_step(script.engine, script.model);
      script.step();
      script.step();
    });
  });
}

TEST_P(SuperOffloadCalls, ParametersDoNotChangeBeforeTheStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_speculation(offloading_config(GetParam(), 1)), communicator).engine;
    train(*engine, model, 2);
    const auto forward = [&] {
      const torch::NoGradGuard no_grad;
      return model->forward(sample(9, communicator.rank())).clone();
    };
    const at::Tensor before = forward();
    engine->backward(model->loss(sample(3, communicator.rank())));
    EXPECT_TRUE(forward().equal(before));
    engine->step();
    EXPECT_FALSE(forward().equal(before));
    EXPECT_EQ(engine->speculation().stood, 3);
  });
}

TEST_P(SuperOffloadCalls, AnEngineThatEndsBeforeTheStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto engine = start(model.ptr(), with_speculation(offloading_config(GetParam(), 1)), communicator).engine;
    train(*engine, model, 2);
    // It lives longer than the engine.
    const auto optimizer = std::dynamic_pointer_cast<optimizers::SliceOptimizer>(engine->optimizer());
    const State states = optimizer_states(*optimizer);
    std::vector<at::Tensor> masters;
    for (int64_t slice = 0; slice < optimizer->slice_count(); ++slice)
      masters.push_back(optimizer->slice(slice).master.clone());
    engine->backward(model->loss(sample(3, communicator.rank())));
    engine.reset();
    EXPECT_EQ(optimizer->step_count(), 2);
    expect_same_bits(optimizer_states(*optimizer), states, "states");
    for (int64_t slice = 0; slice < optimizer->slice_count(); ++slice) {
      EXPECT_TRUE(optimizer->slice(slice).master.equal(masters[static_cast<size_t>(slice)])) << slice;
    }
  });
}

}  // namespace
}  // namespace ds::engine
