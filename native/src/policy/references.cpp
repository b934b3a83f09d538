#include "policy/references.h"

namespace kvterrace::policy {

void BlockPolicy::request(const Request& request) {
  if (order_ == Order::kHeadFirst) {
    for (std::size_t at = 0; at < request.keys.size(); ++at) access(request.keys[at]);
  } else {
    for (std::size_t at = request.keys.size(); at-- > 0;) access(request.keys[at]);
  }
}

void BlockPolicy::resize(std::size_t capacity) {
  capacity_ = capacity;
  retune();
  while (size() > capacity_) evict_one();
}

void BlockPolicy::evict(std::size_t n) {
  for (; n > 0 && size() > 0; --n) evict_one();
}

std::unique_ptr<BlockPolicy> make_reference(std::string_view name, std::size_t capacity, const Foresight* foresight) {
  if (name == "fifo") return make_fifo(capacity, Order::kTailFirst);
  if (name == "fifo-head") return make_fifo(capacity, Order::kHeadFirst);
  if (name == "lru-tail") return make_lru(capacity, Order::kTailFirst);
  if (name == "lru-head") return make_lru(capacity, Order::kHeadFirst);
  if (name == "lfu") return make_lfu(capacity);
  if (name == "2q") return make_two_q(capacity);
  if (name == "arc") return make_arc(capacity);
  if (name == "s3-fifo") return make_s3_fifo(capacity);
  if (name == "sieve") return make_sieve(capacity);
  if (name == "w-tinylfu") return make_w_tinylfu(capacity);
  if (name == "belady" && foresight) return make_belady(capacity, *foresight);
  return nullptr;
}

}  // namespace kvterrace::policy
