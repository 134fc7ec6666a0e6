// Warnings about what is likely to stop a training or slow it down on this machine, with what to change. Pure.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/report/limits.h"
#include "tools/report/network.h"
#include "tools/report/processor.h"

namespace ds::tool::report {

// Everything that warnings come from.
struct Machine {
  Processor processor;
  Limits limits;
  std::vector<Interface> interfaces;
  Choice gloo, nccl;
  nlohmann::ordered_json libraries, devices;  // answers of ask_libraries() and ask_devices()
  Variables variables;                        // reads the environment
};

std::vector<std::string> warnings_of(const Machine& machine);

}  // namespace ds::tool::report
