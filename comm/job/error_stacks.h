// Stacks in the text of LibTorch's exceptions.
#pragma once

namespace ds::engine {

// From here on c10::Error::what() says what happened and where it was raised, without the 60 frames that led there, as
// in Python. TORCH_SHOW_CPP_STACKTRACES=1, LibTorch's own variable, keeps them. Of the process; once.
void hide_error_stacks();

}  // namespace ds::engine
