// ds-tool-bench: what `ds-tool bench` runs, a program of its own because it loads LibTorch.
#include <iostream>

#include "tools/bench/bench_command.h"

int main(int argc, char** argv) { return ds::tool::bench::run(argc, argv, std::cout, std::cerr); }
