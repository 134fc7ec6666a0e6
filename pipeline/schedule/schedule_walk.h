// Walks the lists of all ranks side by side, as far as they let one another. Torch-free, internal to pipeline/.
#pragma once

#include <vector>

#include "pipeline/schedule/message_route.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

// Calls visit(rank, action) for each action, those of a rank in order and what computes after what sends the message it
// needs. A rank waits nowhere else: sends do not wait for receivers. Returns where each rank stops: at the end of its
// list or, in a schedule whose ranks wait for one another, before an action that never gets its message. Takes time
// linear in the number of actions. Stages and micro-batches must be within the schedule's shape.
template <class Visit>
std::vector<size_t> walk(const Schedule& schedule, const MessageRoutes& routes, Visit visit) {
  std::vector<size_t> next(schedule.actions.size());
  std::vector<bool> sent(routes.size());
  std::vector<bool> waited_for(routes.size());
  std::vector<int> ready;  // ranks to go on with
  for (int rank = static_cast<int>(next.size()) - 1; rank >= 0; --rank) ready.push_back(rank);
  while (!ready.empty()) {
    const int rank = ready.back();
    ready.pop_back();
    const std::vector<Action>& list = schedule.actions[rank];
    for (size_t& i = next[rank]; i < list.size(); ++i) {
      const Action& action = list[i];
      if (is_compute(action.kind)) {
        const auto need = routes.needed_by(action);
        if (need && !sent[routes.index(*need)]) {
          waited_for[routes.index(*need)] = true;
          break;
        }
      }
      visit(rank, action);
      if (!is_send(action.kind)) continue;
      const auto message = routes.moved_by(action);
      if (!message) continue;
      const size_t index = routes.index(*message);
      sent[index] = true;
      if (waited_for[index]) ready.push_back(routes.receiver(*message));
    }
  }
  return next;
}

}  // namespace ds::pipeline
