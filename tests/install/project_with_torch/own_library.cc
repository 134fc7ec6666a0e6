#include "own_library.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

double sum_of_ones(long count) { return at::ones({count}).sum().item<double>(); }
