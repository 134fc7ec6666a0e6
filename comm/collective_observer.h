// Sees the collectives of a rank and what the program does between them: recorders, traces, logs of communication,
// checks that ranks agree.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/collective.h"

namespace ds::comm {

// Attached by Communicator::observe_with, shared by that group and all groups made from it afterwards; any number of
// them, of which the first attached is the outermost. Called on the threads that use these communicators, which may be
// several at a time.
class CollectiveObserver {
 public:
  virtual ~CollectiveObserver() = default;

  // Adds a group of these ranks of the group that the observer was attached to, where this rank has place `own`.
  // Returns the number by which observe() names it.
  virtual int add_group(const std::string& name, const std::vector<int>& ranks, int own) = 0;

  // Runs around one operation: `launch` issues it, and is called once at most, with what it throws passed on. Returns
  // the Work that the caller gets, launch()'s own or one around it. launch() takes the tensors of `collective` away;
  // before it, whoever measures adds to `collective.timers`. May throw CommError instead of issuing.
  virtual Work observe(int group, Collective& collective, c10::function_ref<Work()> launch) = 0;

  // Runs around the making of a group, for which all ranks of `group` meet: `make` is called once, with what it throws
  // passed on. `meeting` is a barrier that names the new group; it is observed as one, unless this is overridden.
  virtual void observe_making(int group, Collective& meeting, c10::function_ref<void()> make) {
    const auto launch = [&] {
      make();
      return Work();
    };
    observe(group, meeting, launch).wait();
  }

  // Returns the text with which all operations are to end, those under way too; empty: there is no such verdict.
  virtual std::string verdict() const { return {}; }

  // Notes what the program does from now on: "backward", "step", ...; micro_step -1: none.
  virtual void phase(const char* name, int64_t step, int64_t micro_step) = 0;
};

}  // namespace ds::comm
