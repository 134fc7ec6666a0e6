// Cuts an exported program between the modules of a list into layers, of which a pipeline makes stages.
//
// The nodes of a layer follow one another in the graph: those before the first block, those of each block with what
// stands behind it, those behind the last block. What a layer takes from those before it travels: hidden states, and
// inputs of the program that a later layer reads. What depends on the inputs alone (rotary tables, masks, sizes) does
// not travel: it is computed by a program of its own, SharedValues, on each rank that needs it. What depends on labels
// is the loss, behind the last layer.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "exported/program.h"

namespace ds::exported {

struct CutOptions {
  std::string blocks;               // "model.layers.*"; empty: the list with most nodes
  std::vector<std::string> labels;  // inputs that the loss alone reads
};

// A part of a program that runs by itself.
struct ProgramPart {
  std::string name;   // of its block, or "before model.layers.*" and "behind model.layers.*"
  std::string block;  // the path of the module that it is, "model.layers.0"; empty: of none
  Program program;    // its inputs are what travels, then shared values; its outputs what travels on
  size_t travelling = 0;
  std::vector<size_t> shared;       // the shared values that it takes, by number
  std::vector<size_t> shared_from;  // which travelling tensors shared values are computed from, where it takes any
};

struct CutProgram {
  std::vector<ProgramPart> layers;
  Program shared;                         // computes the shared values
  ProgramPart loss;                       // takes what the last layer returns, then the labels
  std::vector<std::string> output_names;  // of what the last layer returns first: outputs of forward without labels
  std::vector<std::string> loss_names;    // the outputs of `loss`
};

// Cuts a program whose tensors may have no values yet. Throws UsageError, with the node and Python's line where there
// is one: no such blocks or labels, labels that parameters stand behind, numbers that a layer computes for a later one,
// values that are changed in place across a cut.
CutProgram cut(const Program& program, const CutOptions& options);

}  // namespace ds::exported
