// LibTorch by way of the project's own library, and dsengine; exit code 0 when both answer.
#include <dsengine/config.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "own_library.h"

int main() {
  const nlohmann::json config = {{"train_batch_size", 8}};
  const auto parsed = ds::engine::config::parse(config, {.dp_world_size = 2});
  std::cout << parsed.train_micro_batch_size_per_gpu << " samples a rank, " << sum_of_ones(3) << " ones\n";
  return parsed.train_micro_batch_size_per_gpu == 4 && sum_of_ones(3) == 3 ? 0 : 1;
}
