// Whole parameters for as long as a scope lasts, to read them or to change them: what deepspeed.zero.GatheredParameters
// is, for every stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "zero/parameter_bucket.h"
#include "zero/parameter_gatherer.h"

namespace ds::zero {

// Made by Engine::gathered_parameters. All ranks open and close the same scopes in the same order; forward passes may
// run inside, engine->step() may not. Without a modifier rank the parameters are to be read only: a change is an error
// when the scope closes, also one through .data(). With one, every rank has that rank's values afterwards, and the
// optimizer goes on from them; what other ranks changed is lost.
//
// Other parameters of the same buckets are whole as well.
class GatheredParameters {
 public:
  struct Scope {
    std::vector<std::pair<size_t, ParameterBucket*>> buckets;  // with their numbers, ascending
    std::vector<Parameter> others;                             // in no bucket, whole on every rank
    ParameterGatherer* gatherer = nullptr;                     // null: all parameters are whole already
    comm::Communicator* world = nullptr;                       // all ranks that hold parts or copies
    std::optional<int> modifier_rank;                          // of world
    // A bucket that is whole and the same on all ranks may have new values; called before it is released.
    std::function<void(size_t)> changed;
    std::function<void()> closed;  // always, once
  };

  // Collective. Everything in `scope` outlives this object. Throws CommError.
  explicit GatheredParameters(Scope scope);
  // close(), but what it throws is logged. While an exception unwinds, parameters get the values back that they had:
  // the other ranks may never come to the exchange.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  // Ends the scope. With a modifier rank collective. Throws UsageError naming a parameter that was changed without one,
  // CommError.
  void close();

 private:
  std::vector<const Parameter*> parameters() const;
  void watch();
  void note_change(const at::Tensor& tensor);
  void require_unchanged() const;
  void share_changes();
  void restore();
  void give_back();
  void give_back_after_failure();

  Scope scope_;
  std::vector<int64_t> versions_;  // of parameters() when the scope opened
  // Without a modifier rank: the storages of parameters(), and the first of these that an operator was seen to change,
  // also where its version does not tell (.data()).
  std::unordered_set<const void*> storages_;
  std::optional<std::string> changed_;
  OpInterceptor watch_;
  // With a modifier rank: the values that nothing else holds, of whole buckets and of others.
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
  size_t gathered_ = 0;  // buckets so far
  bool open_ = true;
  int exceptions_;  // under way when the scope opened
};

}  // namespace ds::zero
