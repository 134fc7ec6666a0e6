// Finds which parameters got gradients in a backward pass, on this rank and on any.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

// The rule of a wrapper's options for parameters without a gradient.
enum class UnusedRule {
  kNone,     // there are none: such a pass makes the next one throw
  kAny,      // find_unused_parameters
  kTheSame,  // static_graph: those of the first pass that reduces
};

// The flags that tell it have one element for each parameter, by number. Not thread safe: one pass after the other.
class UsedParameters {
 public:
  // `parameters` outlive it. `device`: of what ranks exchange.
  UsedParameters(const std::vector<zero::Parameter>& parameters, UnusedRule rule, at::Device device)
      : parameters_(parameters), rule_(rule), device_(device) {}

  // Throws UsageError, once, where the rule is kNone and the last pass left parameters without one.
  void require_all_used(const char* call);
  // Whether the pass has to reduce at its end, because the parameters it uses are not yet known.
  bool is_first_of_many() const { return rule_ == UnusedRule::kTheSame && !agreed_; }
  // Agrees with the other ranks, at the end of a pass that reduces, behind its buckets. `own` marks the parameters that
  // had a gradient on this rank since the last reduction. Returns those that had one on any rank; empty: all. Throws
  // UsageError where a graph that is said to stay the same did not. Collective.
  std::vector<char> agree(std::vector<char> own, comm::Communicator& group);
  // Takes part in agree() on a rank that has no pass.
  void take_part(comm::Communicator& group);

 private:
  bool exchanges() const { return rule_ == UnusedRule::kAny || is_first_of_many(); }
  std::vector<char> joined(const std::vector<char>& own, comm::Communicator& group) const;
  std::string names_where(const std::vector<char>& flags, char value) const;

  const std::vector<zero::Parameter>& parameters_;
  UnusedRule rule_;
  at::Device device_;
  bool agreed_ = false;     // kTheSame: `used_` is known
  std::vector<char> own_;   // kTheSame: of this rank's first pass; empty: it has had none
  std::vector<char> used_;  // kTheSame: on any rank
  std::string missing_;     // kNone: names of the last pass
};

}  // namespace ds::loops
