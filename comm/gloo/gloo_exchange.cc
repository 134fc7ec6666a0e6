#include "comm/gloo/gloo_exchange.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/local_reduce.h"
#include "core/check.h"

namespace ds::comm {
namespace {

// Tags of collectives have this bit; those of send and recv do not. The lowest bits tell the phases of one operation.
constexpr int kCollectiveTag = 1 << 30;
constexpr int kPhases = 2;

void copy_unless_same(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void GlooExchange::begin(OperationName operation, int tag) {
  operation_ = std::move(operation);
  tag_ = kCollectiveTag | (tag * kPhases);
  posted_.clear();
}

void GlooExchange::send(const std::byte* data, int64_t bytes, int peer, int phase) {
  if (bytes > 0) posted_.push_back(wire_.post_send(data, bytes, peer, tag_ | phase, *operation_));
}

void GlooExchange::recv(std::byte* data, int64_t bytes, int peer, int phase) {
  if (bytes > 0) posted_.push_back(wire_.post_recv(data, bytes, peer, tag_ | phase, *operation_));
}

void GlooExchange::complete_all() {
  for (const auto& message : posted_) wire_.complete(message, *operation_);
  posted_.clear();
}

std::byte* GlooExchange::staging(int64_t bytes) {
  if (static_cast<int64_t>(staging_.size()) < bytes) staging_.resize(static_cast<size_t>(bytes));
  return staging_.data();
}

std::vector<GlooExchange::Slice> GlooExchange::even_slices(int64_t count, int64_t element_bytes) const {
  std::vector<Slice> slices(wire_.size());
  for (int64_t r = 0; r < wire_.size(); ++r) {
    const int64_t begin = count * r / wire_.size();
    slices[r] = {begin * element_bytes, (count * (r + 1) / wire_.size() - begin) * element_bytes};
  }
  return slices;
}

void GlooExchange::all_gather(std::byte* output, const std::byte* input, int64_t bytes) {
  const int own = wire_.rank();
  for (int step = 1; step < wire_.size(); ++step) {
    const int from = (own + step) % wire_.size();
    recv(output + from * bytes, bytes, from);
  }
  for (int step = 1; step < wire_.size(); ++step) {
    send(input, bytes, (own + wire_.size() - step) % wire_.size());
  }
  copy_unless_same(output + own * bytes, input, bytes);
  complete_all();
}

void GlooExchange::gather(std::byte* output, const std::byte* input, int64_t bytes, int root) {
  if (wire_.rank() != root) {
    send(input, bytes, root);
  } else {
    for (int r = 0; r < wire_.size(); ++r) {
      if (r != root) recv(output + r * bytes, bytes, r);
    }
    copy_unless_same(output + root * bytes, input, bytes);
  }
  complete_all();
}

void GlooExchange::scatter(std::byte* output, const std::byte* input, int64_t bytes, int root) {
  if (wire_.rank() != root) {
    recv(output, bytes, root);
  } else {
    for (int r = 0; r < wire_.size(); ++r) {
      if (r != root) send(input + r * bytes, bytes, r);
    }
    copy_unless_same(output, input + root * bytes, bytes);
  }
  complete_all();
}

// Small or two ranks: root sends to everyone. Else root scatters pieces and every rank passes its piece on, so that
// root sends the tensor once instead of W-1 times.
void GlooExchange::broadcast(std::byte* data, int64_t bytes, int root) {
  const int own = wire_.rank();
  if (wire_.size() <= 2 || bytes <= kSmallBytes) {
    if (own != root) {
      recv(data, bytes, root);
    } else {
      for (int r = 0; r < wire_.size(); ++r) {
        if (r != root) send(data, bytes, r);
      }
    }
    return complete_all();
  }
  const auto slices = even_slices(bytes, 1);
  for (int r = 0; r < wire_.size(); ++r) {
    if (own == root && r != root) {
      send(data + slices[r].begin, slices[r].length, r, 0);
    } else if (own != root && r != own && r != root) {
      recv(data + slices[r].begin, slices[r].length, r, 1);
    }
  }
  if (own == root) {
    for (int r = 0; r < wire_.size(); ++r) {
      if (r != root) send(data + slices[root].begin, slices[root].length, r, 1);
    }
  } else {
    recv(data + slices[root].begin, slices[root].length, root, 1);
    wire_.complete(wire_.post_recv(data + slices[own].begin, slices[own].length, root, tag_, *operation_), *operation_);
    for (int r = 0; r < wire_.size(); ++r) {
      if (r != own && r != root) send(data + slices[own].begin, slices[own].length, r, 1);
    }
  }
  complete_all();
}

void GlooExchange::all_to_all(std::byte* output, const std::byte* input, const std::vector<int64_t>& output_bytes,
                              const std::vector<int64_t>& input_bytes) {
  const int own = wire_.rank();
  std::vector<int64_t> from(wire_.size()), to(wire_.size());
  for (int r = 1; r < wire_.size(); ++r) {
    from[r] = from[r - 1] + output_bytes[r - 1];
    to[r] = to[r - 1] + input_bytes[r - 1];
  }
  require<UsageError>(output_bytes[own] == input_bytes[own], *operation_,
                      ": expected this rank's split for itself to be equal ", "in input and output, found ",
                      input_bytes[own], " and ", output_bytes[own], " bytes");
  for (int r = 0; r < wire_.size(); ++r) {
    if (r != own) recv(output + from[r], output_bytes[r], r);
  }
  for (int r = 0; r < wire_.size(); ++r) {
    if (r != own) send(input + to[r], input_bytes[r], r);
  }
  copy_unless_same(output + from[own], input + to[own], input_bytes[own]);
  complete_all();
}

// Dissemination barrier (Hensgen, Finkel, Manber 1988): log2(W) rounds.
void GlooExchange::barrier() {
  const int own = wire_.rank();
  const std::byte token{1};
  std::byte heard{};
  for (int distance = 1; distance < wire_.size(); distance *= 2) {
    recv(&heard, 1, (own + wire_.size() - distance) % wire_.size());
    send(&token, 1, (own + distance) % wire_.size());
    complete_all();
  }
}

void GlooExchange::reduce_scatter(std::byte* output, const std::byte* input, int64_t count, at::ScalarType dtype,
                                  ReduceOp op) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  reduce_slices({.input = input,
                 .output = output,
                 .slices = even_slices(count * wire_.size(), element_bytes),
                 .dtype = dtype,
                 .op = op});
}

void GlooExchange::all_reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  if (count * element_bytes <= kSmallBytes) return all_reduce_small(data, count, dtype, op);
  auto slices = even_slices(count, element_bytes);
  reduce_slices({.input = data,
                 .output = data + slices[wire_.rank()].begin,
                 .gathered = data,
                 .slices = std::move(slices),
                 .dtype = dtype,
                 .op = op});
}

void GlooExchange::reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const auto slices = even_slices(count, element_bytes);
  const Slice own = slices[wire_.rank()];
  std::vector<std::byte> result(static_cast<size_t>(own.length));
  reduce_slices({.input = data, .output = result.data(), .slices = slices, .dtype = dtype, .op = op});
  if (wire_.rank() != root) {
    send(result.data(), own.length, root, 1);
  } else {
    for (int r = 0; r < wire_.size(); ++r) {
      if (r != root) recv(data + slices[r].begin, slices[r].length, r, 1);
    }
    copy_unless_same(data + own.begin, result.data(), own.length);
  }
  complete_all();
}

void GlooExchange::all_reduce_small(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op) {
  const int64_t bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
  std::byte* all = staging(bytes * wire_.size());
  all_gather(all, data, bytes);
  std::vector<const void*> sources(wire_.size());
  for (int r = 0; r < wire_.size(); ++r) sources[r] = all + r * bytes;
  local_reduce(data, sources, count, dtype, op);
}

// Note [Posting the gathered chunks early]
// With `gathered`, chunk c of rank j's slice arrives in the very memory that this rank sends to j as its contribution
// to that chunk. That is safe with both posted at once: j sends its result only after all of our contribution to this
// chunk has reached it, so the memory has been read by then. It holds because both phases cut the slice at the same
// places.
void GlooExchange::reduce_slices(const Reduction& reduction) {
  const int own = wire_.rank();
  const int size = wire_.size();
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(reduction.dtype));
  const Slice mine = reduction.slices[own];
  // With many peers the chunks shrink, so that the staging memory stays a few MiB.
  const int64_t chunk = std::max<int64_t>(64 << 10, kChunkBytes / std::max(1, (size - 1) / 2));
  int64_t longest = 0;
  for (const Slice& slice : reduction.slices) longest = std::max(longest, slice.length);
  const int64_t chunks = (longest + chunk - 1) / chunk;
  const auto part = [chunk](const Slice& slice, int64_t c) {
    const int64_t begin = std::min(slice.length, c * chunk);
    return Slice{slice.begin + begin, std::min(chunk, slice.length - begin)};
  };
  const int64_t window = std::min<int64_t>(kWindow, std::max<int64_t>(chunks, 1));
  std::byte* staged = staging(window * size * chunk);
  const auto staged_chunk = [&](int64_t c, int peer) { return staged + ((c % window) * size + peer) * chunk; };
  std::array<std::vector<GlooWire::Message>, kWindow> contributions;

  const auto post_chunk = [&](int64_t c) {
    auto& expected = contributions[c % window];
    expected.clear();
    for (int peer = 0; peer < size; ++peer) {
      if (peer == own) continue;
      if (const Slice piece = part(mine, c); piece.length > 0) {
        expected.push_back(wire_.post_recv(staged_chunk(c, peer), piece.length, peer, tag_, *operation_));
      }
      const Slice theirs = part(reduction.slices[peer], c);
      send(reduction.input + theirs.begin, theirs.length, peer, 0);
      if (reduction.gathered != nullptr) recv(reduction.gathered + theirs.begin, theirs.length, peer, 1);
    }
  };
  for (int64_t c = 0; c < window && c < chunks; ++c) post_chunk(c);
  std::vector<const void*> sources(size);
  for (int64_t c = 0; c < chunks; ++c) {
    for (const auto& message : contributions[c % window]) wire_.complete(message, *operation_);
    if (const Slice piece = part(mine, c); piece.length > 0) {
      for (int peer = 0; peer < size; ++peer) {
        sources[peer] = peer == own ? reduction.input + piece.begin : staged_chunk(c, peer);
      }
      std::byte* result = reduction.output + (piece.begin - mine.begin);
      local_reduce(result, sources, piece.length / element_bytes, reduction.dtype, reduction.op);
      for (int peer = 0; peer < size && reduction.gathered != nullptr; ++peer) {
        if (peer != own) send(result, piece.length, peer, 1);
      }
    }
    if (c + window < chunks) post_chunk(c + window);
  }
  complete_all();
}

}  // namespace ds::comm
