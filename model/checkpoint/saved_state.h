// The tensors that a rank writes in one save, and how they get from live memory to files: at once, or beside training.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/background_save.h"
#include "checkpoint/rank_files.h"
#include "checkpoint/save_job.h"
#include "model/checkpoint/checkpoint_pieces.h"
#include "model/checkpoint/rank_state.h"
#include "model/state/model_state.h"

namespace ds::engine {

// The pieces that this rank writes: those of the model state, then copies of what is the rank's own.
struct SavedState {
  std::vector<StatePiece> pieces;
  std::vector<bool> copied;  // whether a piece is copied before an asynchronous save returns
  NamedTensors own;

  std::vector<checkpoint::PlannedPiece> plan() const;
};

// Writes all pieces from live memory.
void write_live(const ModelState& model, checkpoint::SaveJob& job, const SavedState& saved);

// Copies, for an asynchronous save, what training may change at any time and what has memory only now.
void copy_what_cannot_wait(const ModelState& model, SavedState& saved);
// Returns the parts of an asynchronous save that run on another thread, after what the device has to do by now; without
// the publication.
checkpoint::BackgroundSave::Parts background_parts(const std::shared_ptr<checkpoint::SaveJob>& job,
                                                   const std::shared_ptr<SavedState>& saved, at::Device device);

}  // namespace ds::engine
