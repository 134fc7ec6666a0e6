// The program's control of when the parameters of a sharded module are full: what it says by the functions of
// FullySharded, beside what the gatherer does by itself for operators.
#pragma once

#include <cstddef>
#include <vector>

#include "dsengine/fully_shard.h"
#include "zero/gather/parameter_gatherer.h"

namespace ds::loops {

// Buckets are numbered as the gatherer numbers them; by default they are resharded after forward and after backward.
class GatherControl {
 public:
  // `gatherer` has so many buckets, and outlives it.
  GatherControl(zero::ParameterGatherer& gatherer, size_t buckets, BackwardPrefetch prefetch);

  // Makes buckets full until they are resharded, whatever passes do. Collective.
  void unshard(const std::vector<size_t>& buckets);
  void reshard(const std::vector<size_t>& buckets);
  // Reshards all buckets: slices have new values, by anything else than the model's own backward passes.
  void reshard_all();
  // Reshards a bucket, if it is full, before its slices change.
  void reshard_if_whole(size_t bucket);

  void set_reshard_after_forward(const std::vector<size_t>& buckets, bool on);
  void set_reshard_after_backward(const std::vector<size_t>& buckets, bool on);
  // Gathers `buckets` ahead when one of `when` is used in forward or in backward.
  void prefetch(const std::vector<size_t>& when, const std::vector<size_t>& buckets, bool in_backward);

  // Begins a backward pass with the gatherer, whose own end_backward() is called before end_pass(). `update_follows`:
  // an optimizer may step after it.
  void begin_backward(bool update_follows);
  // Reshards, at the end of a backward pass, the buckets that do not stay full after it, and ends it with the gatherer.
  void end_pass();

 private:
  void reshard_one(size_t bucket);

  zero::ParameterGatherer& gatherer_;
  std::vector<char> reshards_after_backward_;  // a flag for each bucket
  std::vector<char> held_;                     // whether unshard() holds the bucket
  zero::PrefetchRules prefetch_;
};

}  // namespace ds::loops
