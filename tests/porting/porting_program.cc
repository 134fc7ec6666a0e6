// Runs one of the programs as a process, so that `ds-launch parity` can start it (scripts/parity_grid).
//
//   porting_program --list
//   porting_program NAME --show_config --ranks 2
//   ds-launch --num_procs 2 porting_program NAME [--stage 2]
//
// --list prints the names, with the flags of `ds-launch parity` that a program needs. --show_config prints the config
// of a program's engine, for a file that the command takes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "dsengine/init_distributed.h"
#include "tests/porting/programs.h"

namespace {

using ds::engine::Config;
using ds::engine::Program;

const Program& program_of(const std::string& name) {
  const auto& all = ds::engine::all_programs();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Program& program) { return program.name == name; });
  if (found == all.end()) throw std::invalid_argument("expected a name that --list prints, found \"" + name + "\"");
  return *found;
}

void list() {
  for (const Program& program : ds::engine::all_programs()) {
    std::cout << program.name << (program.cuts_global_batches ? " --global_batches" : "") << std::endl;
  }
}

void train(const Program& program, const Config& zero) {
  const ds::engine::Distributed job = ds::engine::init_distributed();
  const ds::engine::Losses losses = program.train_on_engine(*job.ranks, zero);
  if (job.ranks->rank() == 0) std::cout << program.name << ": last loss " << losses.back() << std::endl;
}

}  // namespace

int main(int count, char** arguments) {
  CLI::App app("Runs a program of tests/porting", "porting_program");
  std::string name;
  bool lists = false;
  bool shows_config = false;
  int ranks = 1;
  int stage = 0;
  app.add_option("name", name, "a name that --list prints");
  app.add_flag("--list", lists, "print the names");
  app.add_flag("--show_config", shows_config, "print the config of the program's engine");
  app.add_option("--ranks", ranks, "of --show_config")->check(CLI::PositiveNumber);
  app.add_option("--stage", stage, "of ZeRO")->check(CLI::Range(0, 3));
  CLI11_PARSE(app, count, arguments);
  try {
    const Config zero = {{"stage", stage}};
    if (lists) {
      list();
      return EXIT_SUCCESS;
    }
    const Program& program = program_of(name);
    if (shows_config) {
      std::cout << (program.config ? program.config(ranks, zero) : ds::engine::adamw_config(zero)).dump(2) << std::endl;
    } else {
      train(program, zero);
    }
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "porting_program: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
