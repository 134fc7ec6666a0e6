#include <vector>

#include "tests/porting/programs.h"

namespace ds::engine {

const std::vector<Program>& all_programs() {
  static const std::vector<Program> all = [] {
    std::vector<Program> result = {residual_cnn(), packed_lstm(), dcgan(), wgan_gp(), pinn(), policy_gradient()};
    for (const auto& some : {carried_programs(), dynamics_programs(), inner_loop_programs(), methods_programs(),
                             text_programs(), vision_programs()}) {
      result.insert(result.end(), some.begin(), some.end());
    }
    return result;
  }();
  return all;
}

}  // namespace ds::engine
