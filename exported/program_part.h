// A part of an exported program that runs by itself.
#pragma once

#include <cstddef>
#include <vector>

#include "exported/program.h"
#include "exported/value_facts.h"

namespace ds::exported {

// Which nodes of the main graph a part has, and the slots there of its inputs, in two lists, and of its outputs.
struct PartSlots {
  std::vector<size_t> nodes;
  std::vector<int> travelling;
  std::vector<int> shared;
  std::vector<int> outputs;
};

// Returns a program of these nodes, with the lifted tensors that they read. It writes those buffers after the run that
// `program` writes from values of these nodes. An input that it changes in place is a copy.
Program part_of(const Program& program, const ValueFacts& facts, const PartSlots& slots);

}  // namespace ds::exported
