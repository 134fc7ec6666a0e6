// Communicator for CPU tensors of ranks on several hosts: shared memory inside each host, TCP (gloo) between them.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// A group of ranks and the hosts that they are on.
struct PlacedGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::string name = "world";
  std::vector<std::vector<int>> hosts;  // the ranks on each host, ascending: Rendezvous::hosts()
  std::vector<std::string> peers;       // who each rank is, for messages; may be empty
  std::string address;                  // address of this rank's network interface; empty: see GlooOptions
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
};

// Whether every host has the same number of ranks, at least two: what a hierarchy takes.
bool is_even(const std::vector<std::vector<int>>& hosts);

// Makes the fastest communicator for where the ranks are: shared memory on one host, else a HierarchicalCommunicator,
// which is flat gloo where the hosts are not even. Every rank of the group calls it. Throws CommError.
//
// With L ranks on each of H hosts, an all_reduce of n bytes reduces inside the hosts, then each rank all_reduces its
// n/L bytes with the ranks of the same position on the other hosts, then gathers inside the host: 2 (n/L) (H-1)/H bytes
// a rank go over the network instead of 2 n (W-1)/W. reduce_scatter and all_gather likewise (where ranks are numbered
// host after host), broadcast and reduce send n bytes to each host once. gather, scatter and all_to_all, and average of
// integers, gain nothing and run flat. Sums are added per host first, in rank order, then over hosts: the same bits on
// every rank and in every run; bfloat16 and float16 are rounded once per level, so a result may differ from a flat
// one in the last place. Groups made from it choose anew by where their ranks are.
std::shared_ptr<Communicator> make_placed_communicator(const PlacedGroup& group);

}  // namespace ds::comm
