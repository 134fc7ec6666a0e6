// One step of a pipeline schedule. Torch-free.
//
// Words, here and in all of pipeline/: the model is cut into *stages*, numbered in the order of its layers. Each *rank*
// of the pipeline runs one stage or, in schedules with several *chunks*, so many. A batch is cut into *micro-batches*.
#pragma once

#include <cstdint>
#include <string>

namespace ds::pipeline {

enum class ActionKind : uint8_t {
  kForward,         // one micro-batch through one stage
  kBackward,        // gradients of the stage's input and weights, in one pass
  kBackwardInput,   // gradient of the stage's input only ("B" of zero-bubble schedules, Qi et al., arXiv:2401.10241)
  kBackwardWeight,  // afterwards, gradients of the stage's weights ("W")
  kSendActivation,  // starts to send what `stage` has computed to stage + 1, on another rank
  kRecvActivation,  // starts to receive the input of `stage` from stage - 1
  kSendGradient,    // starts to send the gradient of the input of `stage` to stage - 1
  kRecvGradient,    // starts to receive the gradient of what `stage` has computed from stage + 1
  kReduce,          // gradients are reduced over the data-parallel ranks, as far as backward has not done it
  kReduceTied,      // then, those of weights that several stages share are added, over the stages
  kStep,            // one norm over all ranks, then the optimizer
};

// Kinds that take a stage and a micro-batch; kReduce, kReduceTied and kStep are of the whole rank, and end its list.
bool is_compute(ActionKind kind);
bool is_send(ActionKind kind);
bool is_recv(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};

// Returns the text of an action, as torch.distributed.pipelining writes it: stage, letter, micro-batch. "0F3" forward,
// "0B3" backward, "0I3" backward of the input, "0W3" of the weights; "0SF3", "0RF3" an activation is sent, received,
// "0SB3", "0RB3" a gradient; "REDUCE", "REDUCE_TIED", "STEP".
std::string to_text(const Action& action);
std::ostream& operator<<(std::ostream& out, const Action& action);  // the same, as a part of a message
// Throws ConfigError naming the text for anything else.
Action parse_action(const std::string& text);

}  // namespace ds::pipeline
