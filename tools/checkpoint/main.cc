// ds-tool-checkpoint: what `ds-tool checkpoint` runs, a program of its own because it loads LibTorch.
#include <iostream>

#include "tools/checkpoint/command_line.h"

int main(int argc, char** argv) { return ds::checkpoint::tool::run(argc, argv, std::cout, std::cerr); }
