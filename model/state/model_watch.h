// Notices what the program does to the model between calls of its engine: parameters with other memory (torch::load,
// set_data, to()), values changed by hand, parameters frozen, unfrozen, added and removed. It is found when the engine
// is next called.
//
// What can be followed is followed, the same at every stage and in every precision: values that the program loads or
// sets reach buckets and masters, and frozen parameters stay as they are. All ranks are to do the same; what each has
// done is compared once a step (take_digests()). The rest is a UsageError that names the parameter and leaves the state
// as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/background_save.h"
#include "model/state/model_state.h"

namespace ds::engine {

// Used on the engine's thread, which has to look before it uses parameters for anything but reading their slices.
class ModelWatch {
 public:
  // `state` is built already. What `saving` copies is left alone until it has been copied. Both outlive the watch.
  ModelWatch(ModelState& state, checkpoint::BackgroundSave& saving);
  ~ModelWatch();
  ModelWatch(const ModelWatch&) = delete;
  ModelWatch& operator=(const ModelWatch&) = delete;

  // Takes over what has changed. Waits for parameters that are on their way only where something has. `call`: whose.
  void look(const char* call);
  // Looks at the parameters and at the list of the module's parameters, which costs some microseconds more.
  void look_at_module(const char* call);
  // Forgets the changes since the last look, and masters that earlier ones have overwritten: parameters and masters are
  // as the engine has made them.
  void renew();
  // Forgets the changes of the parameters of these buckets since the last look.
  void renew(const std::vector<size_t>& buckets);
  // The engine has updated the parameters: a graph that was made from the old values is refused by autograd, as after a
  // step of torch's optimizers.
  void updated();
  // The engine has put averaged weights into the parameters (`shown`), or its own again, which leaves masters as they
  // are: graphs from before are refused as after updated(). Changes of the program are refused while they are shown.
  void average_shown(bool shown);

  // Whether parameters of a bucket that were trainable require no gradient now.
  bool any_frozen() const { return frozen_ > 0; }
  // Digests of what was taken over since the last call, and of what is frozen; 0: nothing.
  struct Digests {
    uint64_t all = 0;   // equal on ranks with the same part of the model that did the same
    uint64_t axis = 0;  // equal on ranks of a tensor axis that did the same: values of parts do not count
  };
  Digests take_digests();
  // Returns the name of a parameter that was taken over since the last call of take_name().
  std::string take_name() { return std::exchange(last_changed_, {}); }

 private:
  // The state of a parameter when it was last looked at.
  struct Seen {
    const zero::Parameter* parameter;
    int64_t version = 0;
    bool requires_grad = false;
  };

  void note_frozen(const char* call);
  void look_at_buckets(const char* call, std::vector<zero::ParameterBucket>& buckets, size_t first);
  void take_over(const char* call, size_t bucket, size_t position);
  // Throws UsageError, naming a parameter that was changed in place, where an update may be running beside the program.
  void require_no_update_beside(const char* call, const std::string& parameter) const;
  // Throws UsageError, naming a parameter that was changed, while averaged weights are shown.
  void require_own_weights(const char* call, const std::string& parameter) const;
  // Lets autograd refuse graphs that were made from the old values of trained parameters.
  void bump_versions();
  void note_versions();
  std::vector<Seen>& list_of(size_t bucket) { return bucket < state_.buckets.size() ? trained_ : others_; }
  void note(const std::string& parameter, uint64_t digest, bool is_part);
  zero::ParameterBucket& bucket_at(size_t bucket) const;

  ModelState& state_;
  checkpoint::BackgroundSave& saving_;
  std::vector<Seen> trained_;  // one for each of state.parameters, in order
  std::vector<Seen> others_;   // one for each of state.frozen, in order
  size_t frozen_ = 0;          // how many of trained_
  bool shows_average_ = false;
  Digests digests_;
  std::string last_changed_;
  std::vector<const void*> identities_;  // the module's parameters, in its order
};

}  // namespace ds::engine
