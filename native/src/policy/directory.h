// A directory plays the eviction policy of one tier over keys of blocks: it is told of each request and decides which
// keys are inside. It holds no bytes and does no I/O. One thread at a time; the same calls give the same decisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace kvterrace::policy {

using Key = std::uint64_t;

struct Request {
  std::span<const Key> keys;  // of its blocks, head first; a key stands for its whole prefix
  double now_s = 0.0;
  std::int32_t output_tokens = -1;  // of the answer; -1: not known
  bool extend = false;              // the new tail of the turn that touched this chain last, and no turn of its own
};

class Directory {
 public:
  virtual ~Directory() = default;

  // The blocks of a request are used: those inside are touched, the others come in, and what there is no room for leaves
  // (a new block may leave at once).
  virtual void request(const Request& request) = 0;
  virtual bool inside(Key key) const = 0;
  virtual std::size_t size() const = 0;  // keys inside
  // From now on at most `capacity` keys are inside.
  virtual void resize(std::size_t capacity) = 0;
  // `n` keys more leave than the capacity asks for, or all there are.
  virtual void evict(std::size_t n) = 0;
  // `key` is gone from the tier for a reason of its own. It is not told of as evicted.
  virtual void forget(Key key) = 0;
  virtual std::size_t nbytes() const = 0;  // of memory taken

  // Keys that have left since the last call, in order.
  std::vector<Key> take_evicted() { return std::exchange(evicted_, {}); }

 protected:
  std::vector<Key> evicted_;
};

}  // namespace kvterrace::policy
