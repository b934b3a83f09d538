// Policies of the literature, block by block, as a yardstick: they know nothing of prefixes, requests or time.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "policy/directory.h"
#include "policy/foresight.h"

namespace kvterrace::policy {

// The order in which the blocks of a request are used. Tail first, its head ends as the latest.
enum class Order { kHeadFirst, kTailFirst };

class BlockPolicy : public Directory {
 public:
  BlockPolicy(std::size_t capacity, Order order) : capacity_(capacity), order_(order) {}

  void request(const Request& request) final;
  // One block is used: touched if it is inside, else it comes in and what there is no room for leaves.
  virtual void access(Key key) = 0;
  void resize(std::size_t capacity) final;
  void evict(std::size_t n) final;

  Order order() const { return order_; }

 protected:
  // The policy's choice leaves. Something is inside.
  virtual void evict_one() = 0;
  // `capacity_` has another value.
  virtual void retune() {}
  void gone(Key key) { evicted_.push_back(key); }

  std::size_t capacity_;

 private:
  Order order_;
};

// Names: fifo, fifo-head, lru-head, lru-tail, lfu, 2q, arc, s3-fifo, sieve, w-tinylfu, belady. Null for others, and for
// belady without foresight. `capacity` is not 0; `foresight` outlives the policy.
std::unique_ptr<BlockPolicy> make_reference(std::string_view name, std::size_t capacity,
                                            const Foresight* foresight = nullptr);

// One file each.
std::unique_ptr<BlockPolicy> make_fifo(std::size_t capacity, Order order);
std::unique_ptr<BlockPolicy> make_lru(std::size_t capacity, Order order);
std::unique_ptr<BlockPolicy> make_lfu(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_two_q(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_arc(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_s3_fifo(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_sieve(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_w_tinylfu(std::size_t capacity);
std::unique_ptr<BlockPolicy> make_belady(std::size_t capacity, const Foresight& foresight);

}  // namespace kvterrace::policy
