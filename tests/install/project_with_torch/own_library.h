// A part of the project that knows LibTorch only.
#pragma once

double sum_of_ones(long count);
