// Attention over a sequence of which each rank has some pieces, in any order: what the calls of
// dsengine/sequence_attention.h and the rule for split tensors share. Arguments are checked by the callers.
#pragma once

#include "parallel/sequence/position_pieces.h"
#include "parallel/sequence/score_block.h"

namespace ds::parallel {

// `inputs` are of the rank's own positions.

// Brings keys and values to the ranks whose queries see some of them (Note [Which keys travel]). A null `group`: one
// rank has the whole sequence. The group outlives the graph.
at::Tensor ring_over_pieces(const AttentionInputs& inputs, PositionPieces pieces, SeenPositions seen,
                            comm::Communicator* group);

// Exchanges positions for heads, of which there is one of queries for each rank or more. Dropout goes without documents
// and window.
at::Tensor ulysses_over_pieces(const AttentionInputs& inputs, const PositionPieces& pieces, const SeenPositions& seen,
                               double dropout, comm::Communicator& group);

}  // namespace ds::parallel
