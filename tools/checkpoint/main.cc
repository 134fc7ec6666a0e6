// ds-tool-checkpoint: what `ds-tool checkpoint` runs, a program of its own because it loads LibTorch.
#include <csignal>
#include <iostream>

#include "core/write_signals.h"
#include "tools/checkpoint/command_line.h"

int main(int argc, char** argv) {
  ds::let_writes_fail({SIGXFSZ});
  return ds::checkpoint::tool::run(argc, argv, std::cout, std::cerr);
}
