// Stacks in the text of LibTorch's exceptions. Namespace: see joined_job.h.
#pragma once

namespace ds::engine {

// Makes c10::Error::what() say what happened and where it was raised, without the 60 frames that led there, as
// in Python. TORCH_SHOW_CPP_STACKTRACES=1, LibTorch's own variable, keeps them. Works for the whole process; later
// calls do nothing.
void hide_error_stacks();

}  // namespace ds::engine
